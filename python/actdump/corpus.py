"""Makes a corpus for `actdump run` (a Megatron pair, OUTPUT.bin and OUTPUT.idx) from what people have.

    python -m actdump.corpus dataset_folder OUTPUT         saved by the package datasets: Arrow, with input_ids
    python -m actdump.corpus data.parquet OUTPUT           or a folder of .parquet or .arrow files
    python -m actdump.corpus ids.jsonl OUTPUT              a list of ids a line, or {"input_ids": [...]}
    python -m actdump.corpus text.jsonl OUTPUT --tokenizer tokenizer.json     {"text": "..."} a line; any of the above
    python -m actdump.corpus text.txt OUTPUT --tokenizer tokenizer.json       a document a line

A row or line is a document, and keeps its number (an empty one stays as an empty document). Input is streamed; memory
grows by 4 bytes a document. Where there is an attention_mask, ids with mask 0 are left out, and counted."""

from __future__ import annotations

import argparse
import array
import gzip
import json
import os
import struct
import sys
import time
from pathlib import Path
from typing import Iterator, NamedTuple

import numpy as np

BATCH_DOCUMENTS = 1000
MAX_ID = 2**31 - 1


class CorpusError(Exception):
    """The input cannot be made a corpus of; says which file, where in it, and why."""


class Part(NamedTuple):
    """Some documents: their ids end to end, and their lengths. done: share of all input read so far."""

    ids: np.ndarray
    lengths: np.ndarray
    done: float
    masked: int = 0


class Writer:
    """A Megatron indexed dataset: uint16 ids until one does not fit, int32 from then on."""

    def __init__(self, stem: Path, force: bool = False):
        self.stem = stem
        self.names = [stem.with_name(stem.name + suffix) for suffix in (".bin", ".idx")]
        there = [str(n) for n in self.names if n.exists()]
        if there and not force:
            raise CorpusError(f"{' and '.join(there)}: there already (--force writes them anew)")
        stem.parent.mkdir(parents=True, exist_ok=True)
        self.temporary = [n.with_name(f".{n.name}.tmp") for n in self.names]
        self.dtype, self.lengths, self.n_tokens = np.dtype("<u2"), array.array("i"), 0
        self.file = open(self.temporary[0], "wb+")

    def add(self, ids: np.ndarray, lengths: np.ndarray):
        if len(ids) and self.dtype.itemsize == 2 and int(ids.max()) > 0xFFFF:
            self._widen()
        self.file.write(ids.astype(self.dtype).tobytes())
        self.lengths.frombytes(np.asarray(lengths, np.int32).tobytes())
        self.n_tokens += len(ids)

    def _widen(self):
        wide = self.temporary[0].with_suffix(".wide.tmp")
        self.file.seek(0)
        with open(wide, "wb") as out:
            while part := self.file.read(1 << 22):
                out.write(np.frombuffer(part, "<u2").astype("<i4").tobytes())
        self.file.close()
        os.replace(wide, self.temporary[0])
        self.dtype, self.file = np.dtype("<i4"), open(self.temporary[0], "ab")

    def finish(self):
        lengths, n = np.frombuffer(self.lengths, np.int32), len(self.lengths)
        with open(self.temporary[1], "wb") as out:
            code = 8 if self.dtype.itemsize == 2 else 4
            out.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, n, n + 1))
            out.write(lengths.astype("<i4").tobytes())
            at = 0
            for i in range(0, n, 1 << 20):
                part = lengths[i : i + (1 << 20)].astype(np.int64) * self.dtype.itemsize
                ends = at + np.cumsum(part)
                out.write((ends - part).astype("<i8").tobytes())
                at = int(ends[-1])
            for i in range(0, n + 1, 1 << 20):
                out.write(np.arange(i, min(i + (1 << 20), n + 1), dtype="<i8").tobytes())
            out.flush()
            os.fsync(out.fileno())
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        for temporary, name in zip(self.temporary, self.names):  # the index last: a pair with an index is whole
            os.replace(temporary, name)

    def drop(self):
        self.file.close()
        for temporary in self.temporary:
            temporary.unlink(missing_ok=True)


def convert(
    source,
    output,
    tokenizer=None,
    field: str | None = None,
    special_tokens: bool = True,
    end_id: int | None = None,
    split: str | None = None,
    force: bool = False,
    progress=None,
) -> dict:
    """Writes output.bin and output.idx; returns counts. progress(share done, tokens so far) is called now and then."""
    encode = None if tokenizer is None else _encoder(tokenizer, special_tokens)
    parts = _parts(Path(source), encode, field, split)
    writer, masked, empty = Writer(Path(output), force), 0, 0
    try:
        for part in parts:
            ids, lengths = part.ids, part.lengths
            if end_id is not None:
                ids = np.insert(ids, np.cumsum(lengths), end_id)
                lengths = lengths + 1
            writer.add(ids, lengths)
            masked, empty = masked + part.masked, empty + int((lengths == 0).sum())
            if progress:
                progress(part.done, writer.n_tokens)
        writer.finish()
    except BaseException:
        writer.drop()
        raise
    return {
        "documents": len(writer.lengths),
        "tokens": writer.n_tokens,
        "empty": empty,
        "masked": masked,
        "dtype": "uint16" if writer.dtype.itemsize == 2 else "int32",
    }


# ---------------------------------------------------------------- input


def _parts(source: Path, encode, field, split) -> Iterator[Part]:
    files, kind = _files(source, split)
    if kind in ("arrow", "parquet"):
        yield from _columns(files, kind, encode, field)
        return
    total, before = sum(f.stat().st_size for f in files) or 1, 0
    for file in files:
        for ids, lengths, at in _lines(file, kind, encode, field):
            yield Part(ids, lengths, (before + at) / total)
        before += file.stat().st_size


def _files(source: Path, split: str | None) -> tuple[list[Path], str]:
    if source.is_dir():
        if (source / "dataset_dict.json").exists():
            splits = json.loads((source / "dataset_dict.json").read_text())["splits"]
            if split is None and len(splits) > 1:
                raise CorpusError(f"{source}: name one of its splits with --split: {', '.join(splits)}")
            if split is not None and split not in splits:
                raise CorpusError(f"{source}: no split {split!r}, it has {', '.join(splits)}")
            return _files(source / (split or splits[0]), None)
        if split is not None:
            raise CorpusError(f"{source}: has no splits, so --split {split} says nothing")
        if (source / "state.json").exists():
            names = [f["filename"] for f in json.loads((source / "state.json").read_text())["_data_files"]]
            return [source / n for n in names], "arrow"
        for suffix in ("parquet", "arrow", "jsonl", "txt"):
            if found := sorted(source.rglob(f"*.{suffix}")):
                return found, suffix
        raise CorpusError(f"{source}: no .parquet, .arrow, .jsonl or .txt in it")
    if not source.exists():
        raise CorpusError(f"{source}: not there")
    name = source.name.removesuffix(".gz")
    kind = {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "txt"}
    if Path(name).suffix not in kind:
        raise CorpusError(f"{source}: not a .parquet, .arrow, .jsonl or .txt (or .jsonl.gz, .txt.gz), nor a folder")
    return [source], kind[Path(name).suffix]


def _lines(file: Path, kind: str, encode, field) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    if kind == "txt" and encode is None:
        raise CorpusError(f"{file}: text needs --tokenizer tokenizer.json")
    with open(file, "rb") as raw:
        stream = gzip.open(raw) if file.suffix == ".gz" else raw
        held: list = []
        for number, line in enumerate(stream, 1):
            if kind == "txt":
                held.append(line.decode("utf-8", errors="replace").rstrip("\r\n"))
            else:
                if not line.strip():
                    continue
                held.append(_document(line, f"{file}:{number}", encode, field))
            if len(held) == BATCH_DOCUMENTS:
                yield *_packed(held, encode), raw.tell()
                held = []
        if held:
            yield *_packed(held, encode), raw.tell()


def _document(line: bytes, where: str, encode, field):
    """A line's text, where there is a tokenizer, else its ids as an array."""
    try:
        found = json.loads(line)
    except ValueError as error:
        raise CorpusError(f"{where}: not JSON: {error}") from None
    name = field or ("input_ids" if encode is None else "text")
    if isinstance(found, dict):
        if name not in found:
            hint = "; text needs --tokenizer" if encode is None and "text" in found else ""
            raise CorpusError(f"{where}: no {name!r}, it has {', '.join(found)}{hint}")
        found = found[name]
    if encode is not None:
        if not isinstance(found, str):
            raise CorpusError(f"{where}: {name} is not text but {type(found).__name__}")
        return found
    if not isinstance(found, list) or not all(type(i) is int for i in found):
        raise CorpusError(f"{where}: {name} is not a list of integers")
    return _checked(np.array(found, dtype=object if any(abs(i) > MAX_ID for i in found) else np.int64), where)


def _checked(ids: np.ndarray, where: str) -> np.ndarray:
    if len(ids) and not (ids.min() >= 0 and ids.max() <= MAX_ID):
        raise CorpusError(f"{where}: id {ids.min() if ids.min() < 0 else ids.max()} is not in 0 to {MAX_ID}")
    return ids


def _packed(held: list, encode) -> tuple[np.ndarray, np.ndarray]:
    documents = held if encode is None else encode(held)
    lengths = np.array([len(d) for d in documents], np.int64)
    return np.concatenate([np.asarray(d, np.int64) for d in documents] or [np.empty(0, np.int64)]), lengths


def _encoder(tokenizer, special_tokens: bool):
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise CorpusError("reading text needs the package tokenizers: pip install tokenizers") from None
    try:
        loaded = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the package raises plain Exception
        raise CorpusError(f"{tokenizer}: not a tokenizer.json: {error}") from None
    loaded.no_truncation()
    loaded.no_padding()
    return lambda texts: [e.ids for e in loaded.encode_batch(texts, add_special_tokens=special_tokens)]


def _columns(files: list[Path], kind: str, encode, field) -> Iterator[Part]:
    try:
        import pyarrow as pa
    except ImportError:
        raise CorpusError("reading Arrow and Parquet needs the package pyarrow: pip install pyarrow") from None
    name = field or ("input_ids" if encode is None else "text")
    for k, file in enumerate(files):
        row = 0
        try:
            for batch, share in (_parquet if kind == "parquet" else _arrow)(file, name):
                part = _part(batch, name, f"{file}, rows from {row}", encode)
                yield part._replace(done=(k + share) / len(files))
                row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise CorpusError(f"{file}: {error}") from None


def _parquet(file: Path, name: str):
    import pyarrow.parquet as pq

    opened = pq.ParquetFile(file)
    _need_column(file, name, opened.schema_arrow.names)
    wanted = [c for c in (name, "attention_mask") if c in opened.schema_arrow.names]
    done = 0
    for batch in opened.iter_batches(BATCH_DOCUMENTS, columns=wanted):
        done += batch.num_rows
        yield batch, done / max(1, opened.metadata.num_rows)


def _arrow(file: Path, name: str):
    import pyarrow as pa

    with pa.memory_map(str(file)) as source:
        size = source.size()
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        if is_file:
            reader = pa.ipc.open_file(source)
            batches = (
                (reader.get_batch(i), (i + 1) / reader.num_record_batches) for i in range(reader.num_record_batches)
            )
        else:
            reader = pa.ipc.open_stream(source)
            batches = ((batch, source.tell() / size) for batch in reader)
        _need_column(file, name, reader.schema.names)
        for batch, share in batches:
            for i in range(0, batch.num_rows, BATCH_DOCUMENTS):
                yield batch.slice(i, BATCH_DOCUMENTS), share


def _need_column(file: Path, name: str, there: list[str]):
    if name not in there:
        hint = "; text needs --tokenizer" if name == "input_ids" and "text" in there else ""
        raise CorpusError(f"{file}: no column {name!r}, it has {', '.join(there)}{hint}")


def _part(batch, name: str, where: str, encode) -> Part:
    import pyarrow as pa

    column = batch.column(batch.schema.get_field_index(name))
    if encode is not None:
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            raise CorpusError(f"{where}: {name} is {column.type}, not text")
        return Part(*_packed([t or "" for t in column.to_pylist()], encode), 0.0)
    ids, lengths = _flat(column, name, where)
    place = batch.schema.get_field_index("attention_mask")
    if place < 0:
        return Part(ids, lengths, 0.0)
    mask, mask_lengths = _flat(batch.column(place).cast(pa.list_(pa.int64())), "attention_mask", where)
    if not np.array_equal(lengths, mask_lengths):
        raise CorpusError(f"{where}: attention_mask and {name} differ in length")
    keep = mask != 0
    kept = np.add.reduceat(np.append(keep, False), np.minimum(np.cumsum(lengths) - lengths, len(keep)), dtype=np.int64)
    return Part(ids[keep], np.where(lengths > 0, kept, 0), 0.0, int((~keep).sum()))


def _flat(column, name: str, where: str) -> tuple[np.ndarray, np.ndarray]:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not (
        pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or pa.types.is_fixed_size_list(column.type)
    ) or not pa.types.is_integer(column.type.value_type):
        raise CorpusError(f"{where}: {name} is {column.type}, not lists of integers")
    values = column.flatten()
    if values.null_count:
        raise CorpusError(f"{where}: {name} has a null among its ids")
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    ids = values.to_numpy(zero_copy_only=False)
    return _checked(ids, where), lengths.astype(np.int64)


# ---------------------------------------------------------------- the command


class Bar:
    """One line on a terminal; nothing where stderr is none."""

    def __init__(self, stream=sys.stderr):
        self.stream, self.begun, self.shown = stream, time.monotonic(), 0.0

    def __call__(self, done: float, n_tokens: int):
        now = time.monotonic()
        if not self.stream.isatty() or now - self.shown < 0.2:
            return
        self.shown, seconds = now, max(now - self.begun, 1e-3)
        left = seconds * (1 - done) / done if done > 0 else 0
        filled = int(30 * min(done, 1))
        self.stream.write(
            f"\r[{'#' * filled}{'.' * (30 - filled)}] {100 * done:5.1f} %  "
            f"{n_tokens / 1e6:,.2f} M tokens  "
            f"{n_tokens / seconds / 1e6:.2f} M/s  {int(left) // 60}:{int(left) % 60:02d} left \x1b[K"
        )
        self.stream.flush()

    def end(self):
        if self.shown:
            self.stream.write("\r\x1b[K")


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m actdump.corpus", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="folder or file: .arrow, .parquet, .jsonl, .txt (the last two also .gz)")
    parser.add_argument("output", help="the pair's path without suffix: corpus.path of the job file")
    parser.add_argument("--tokenizer", help="tokenizer.json, where the input is text")
    parser.add_argument("--field", help="key or column (default input_ids, or text with --tokenizer)")
    parser.add_argument("--no-special-tokens", action="store_true", help="without those that the tokenizer adds")
    parser.add_argument("--end-id", type=int, help="an id to put at the end of each document")
    parser.add_argument("--split", help="of a folder with several")
    parser.add_argument("--force", action="store_true", help="write over a pair that is there")
    options = parser.parse_args(arguments)
    if options.end_id is not None and not 0 <= options.end_id <= MAX_ID:
        parser.error(f"--end-id {options.end_id} is not in 0 to {MAX_ID}")
    bar = Bar()
    try:
        done = convert(
            options.source,
            options.output,
            options.tokenizer,
            options.field,
            not options.no_special_tokens,
            options.end_id,
            options.split,
            options.force,
            bar,
        )
    except (CorpusError, OSError) as error:
        bar.end()
        print(f"actdump.corpus: {error}", file=sys.stderr)
        return 3
    bar.end()
    words = {"empty": "of them empty", "masked": "ids left out by attention_mask"}
    notes = [f"{done[k]:,} {words[k]}" for k in words if done[k]]
    print(
        f"{options.output}.bin, .idx: {done['documents']:,} documents, {done['tokens']:,} tokens as {done['dtype']}"
        + "".join(f", {n}" for n in notes)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
