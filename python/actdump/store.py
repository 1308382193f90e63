"""A store of activations: what it holds, and its rows as arrays and tensors. schemas/store.md describes the files.

Rows of a capture are numbered from 0 over the segments that store.json lists, as in store.h5. The segments are opened
themselves, never store.h5 (a view of it opens every segment that it touches, and reads a lost one as NaN). A Store
belongs to one thread; it can be pickled, and used on both sides of a fork: each process opens its own files."""

from __future__ import annotations

import html
import json
import os
import re
from collections import OrderedDict
from functools import cached_property
from pathlib import Path
from typing import Any, Iterable, Iterator

import h5py
import numpy as np

from actdump.errors import MissingPlugin, SegmentError, StoreError, VersionError

VERSION = 1
ZSTD_FILTER = 32015
OPEN_FILES = 64  # segments kept open at a time
# What an element is read as. bfloat16 stays its 16 bits until someone asks for numbers.
STORED = {"float32": "<f4", "bfloat16": "<u2", "float16": "<f2", "int32": "<i4", "int64": "<i8"}
NO_CACHE = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
NO_CACHE.set_chunk_cache(0, 0, 1.0)
TABLES = {"input_ids": "<i4", "position": "<i4", "sequence": "<i8", "document": "<i8"}  # of rows
TABLES |= {"start": "<i8", "length": "<i8", "continues": "<i4"}  # and of sequences
ROW_TABLES = ("input_ids", "position", "sequence", "document")
# HDF5 takes a buffer for each chunk. Until a freed block of 31 MiB has taught it otherwise, glibc gets each of them from
# the system, page by page, and gives it back: half of the time of reading. Touched it is not, so it costs nothing.
np.empty(31 << 20, np.uint8)


class Store:
    """The store in folder `path`.

    store.captures            {name: Capture}
    store[path]               a Capture by its name, a Value by its path
    store.sequences           {"number", "document", "start", "length", "continues"}: an entry for each sequence here
    store.complete            whether every unit of the job is here; store.missing_units lists those that are not
    store.info                store.json

    Opening checks store.json, and that each segment that it lists is there with the size that it says (check=False
    skips the latter). A segment's datasets are held against store.json when it is first read."""

    def __init__(self, path: str | os.PathLike, check: bool = True):
        self.path = Path(path)
        self.info = _read_manifest(self.path / "store.json")
        self._prepare()
        if check:
            self.check()

    def __getstate__(self):
        # the same rows on the other side, though the store may have grown
        return {"path": self.path, "info": self.info}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._prepare()

    def _prepare(self):
        info, name = self.info, self.path / "store.json"
        self.complete: bool = info["complete"]
        self.segments = info["segments"]
        listed = {s["unit"] for s in self.segments}
        self.missing_units = [u for u in range(len(info["unit_start"]) - 1) if u not in listed]
        if info["compression"]["filters"]:
            _need_zstd(self.path)
        self._files = _Files(self)
        try:
            self.captures = {c: Capture(self, c) for c in info["captures"]}
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{name}: not as its schema says: {error!r}") from None
        self.values = {v.path: v for c in self.captures.values() for v in c.values.values()}

    def check(self):
        """Holds store.json against the files: every segment there, with the size it had when it was written."""
        faults = []
        for segment in self.segments:
            path = self.path / segment["file"]
            try:
                size = path.stat().st_size
            except OSError as error:
                faults.append(f"{path}: {error.strerror or error}")
                continue
            if size != segment["bytes"]:
                faults.append(f"{path}: {size} bytes, store.json says {segment['bytes']}")
        if faults:
            more = f" (and {len(faults) - 5} more: `actdump verify` lists them all)" if len(faults) > 5 else ""
            raise SegmentError("; ".join(faults[:5]) + more)

    def __getitem__(self, path: str) -> Capture | Value:
        path = path.strip("/")
        found = self.captures.get(path) or self.values.get(path)
        if found is None:
            raise KeyError(f"{self.path} has no {path!r}; it has {_some(list(self.captures) + list(self.values))}")
        return found

    @cached_property
    def sequences(self) -> dict[str, np.ndarray]:
        parts = [
            self._files.tables(i, ("document", "start", "length", "continues"), "sequences", s["n_sequences"])
            for i, s in enumerate(self.segments)
        ]
        table = {k: _joined([p[k] for p in parts]) for k in ("document", "start", "length", "continues")}
        numbers = [np.arange(s["n_sequences"]) + s["first_sequence"] for s in self.segments]
        return {"number": _joined(numbers), **table}

    def close(self):
        self._files.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _headline(self) -> str:
        model, totals = self.info["model"], self.info["totals"]
        here, units = len(self.segments), len(self.info["unit_start"]) - 1
        state = "complete" if self.complete else f"incomplete: {here} of {units} units"
        return (
            f"{self.path}: {model['family']}, {model['n_layers']} layers, hidden size {model['hidden_size']}; "
            f"{totals['n_sequences']:,} sequences, {totals['n_tokens']:,} tokens, {_size(totals['bytes'])}; {state}"
        )

    def _table(self) -> list[tuple[str, ...]]:
        head = ("value", "rows", "shape", "axes", "dtype", "size")
        return [head] + [
            (
                v.path,
                f"{len(v):,}",
                "x".join(map(str, v.shape[1:])) or "-",
                v.layout,
                v.dtype,
                _size(len(v) * v.row_bytes),
            )
            for v in self.values.values()
        ]

    def __repr__(self):
        table = self._table()
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        lines = ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths)).rstrip() for row in table]
        return "\n".join([self._headline(), *lines])

    def _repr_html_(self):
        head, *rows = [[html.escape(cell) for cell in row] for row in self._table()]
        body = "".join("<tr>" + "".join(f"<td style='text-align:left'>{c}</td>" for c in row) + "</tr>" for row in rows)
        return (
            f"<p>{html.escape(self._headline())}</p><table><thead><tr>"
            + "".join(f"<th>{c}</th>" for c in head)
            + f"</tr></thead><tbody>{body}</tbody></table>"
        )


class Capture:
    """One capture of a job: its values, and the rows that they share.

    capture.values            {path within the capture: Value}
    capture["layers/3/layer_output"], capture.value("layer_output", layer=3)
    capture.rows(slice or row numbers)   {"input_ids", "position", "sequence", "document"} of these rows
    capture.select(tokens=..., positions=..., documents=..., sequences=...)   row numbers that match all of them"""

    def __init__(self, store: Store, name: str):
        self.store, self.name = store, name
        counts = [s["rows"][name] for s in store.segments]
        self.first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])  # first row of each segment, and the end
        entries = [d for d in store.info["datasets"] if d["capture"] == name]
        found = [Value(self, e) for e in entries if not e["path"].startswith(f"{name}/rows/")]
        self.values = {v.path.removeprefix(f"{name}/"): v for v in found}
        self.table_rows = next((e["chunk_rows"] for e in entries if e["path"].startswith(f"{name}/rows/")), 16384)

    def __len__(self):
        return int(self.first[-1])

    def __getitem__(self, path: str) -> Value:
        try:
            return self.values[path]
        except KeyError:
            raise KeyError(f"capture {self.name!r} has no {path!r}; it has {_some(list(self.values))}") from None

    def value(self, name: str, layer: int = -1) -> Value:
        """A value by its name ("layer_output", "mlp/router_logits") and layer."""
        return self[name if layer < 0 else f"layers/{layer}/{name}"]

    def rows(self, rows=None) -> dict[str, np.ndarray]:
        """The tables of these rows (default: all): token ids, positions, sequence numbers, documents of the corpus."""
        numbers = _row_numbers(rows, len(self))
        out = {name: np.empty(len(numbers), TABLES[name]) for name in ROW_TABLES}
        for i, begin, end, which in _by_segment(numbers, self.first):
            part = self.segment_rows(i, begin, end)
            for name, column in part.items():
                out[name][which] = column[numbers[which] - self.first[i] - begin]
        return out

    def segment_rows(self, segment: int, begin: int, end: int) -> dict[str, np.ndarray]:
        """Tables of rows [begin, end) of one segment, counted from the segment's first."""
        store, record = self.store, self.store.segments[segment]
        n_rows = int(self.first[segment + 1] - self.first[segment])
        part = store._files.tables(segment, ROW_TABLES[:3], f"{self.name}/rows", n_rows, begin, end)
        documents = store._files.tables(segment, ("document",), "sequences", record["n_sequences"])["document"]
        local = part["sequence"] - record["first_sequence"]
        if len(local) and not (local.min() >= 0 and local.max() < len(documents)):
            raise SegmentError(
                f"{store.path / record['file']}: /{self.name}/rows/sequence names a sequence that is not in the file"
            )
        return {**part, "document": documents[local]}

    def select(self, tokens=None, positions=None, documents=None, sequences=None) -> np.ndarray:
        """Numbers of the rows that match every filter given. A filter is an integer, a collection of integers, a
        range or slice, or a function from an array to a mask. Reads the row tables alone."""
        wanted = {"input_ids": tokens, "position": positions, "document": documents, "sequence": sequences}
        found = []
        for i in range(len(self.store.segments)):
            n_rows = int(self.first[i + 1] - self.first[i])
            if not n_rows:
                continue
            part = self.segment_rows(i, 0, n_rows)
            mask = np.ones(n_rows, bool)
            for name, condition in wanted.items():
                if condition is not None:
                    mask &= _matches(part[name], condition)
            found.append(np.flatnonzero(mask) + self.first[i])
        return _joined(found, np.int64)

    def __repr__(self):
        return f"capture {self.name!r}: {len(self):,} rows; " + ", ".join(self.values)


class Value:
    """A value of a capture, over all segments: [row or sequence, ...].

    value[...]                float32 of a bfloat16 value, else as stored; rows by number, slice, list or mask
    value.read(rows, raw=True)   bfloat16 as its 16 bits (uint16)
    value.tensor(rows)        torch, bfloat16 without conversion
    value.shape, dtype, layout, axes, layer, host, name, description
    value.statistics          scalars of store.json; value.moments() also mean and variance by column"""

    def __init__(self, capture: Capture, entry: dict):
        self.capture, self.store, self.path = capture, capture.store, entry["path"]
        self.name, self.host, self.layer = entry["value"], entry["host"], entry["layer"]
        self.dtype, self.layout, self.load_dtype = entry["dtype"], entry["layout"], entry["load_dtype"]
        self.stored_dtype = np.dtype(STORED[self.dtype])
        self.chunk_rows, self.row_bytes = entry["chunk_rows"], entry["row_bytes"]
        self.row_shape = tuple(entry["shape"])
        self.axes = tuple(self.layout.split())
        if self.axes[0] == "row":
            self.first = capture.first
        else:
            counts = [s["n_sequences"] for s in self.store.segments]
            self.first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    def __len__(self):
        return int(self.first[-1])

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self.row_shape)

    @property
    def is_float(self) -> bool:
        return self.dtype in ("float32", "bfloat16", "float16")

    @property
    def statistics(self) -> dict[str, Any] | None:
        return (self.store.info["statistics"] or {}).get(self.path)

    @cached_property
    def description(self) -> str:
        for i in range(len(self.store.segments)):
            return str(self.store._files.dataset(i, self).attrs.get("description", ""))
        return ""

    def __getitem__(self, key) -> np.ndarray:
        first, rest = (key[0], key[1:]) if isinstance(key, tuple) and key else (key, ())
        if first is Ellipsis:
            if rest:
                raise IndexError("begin with the rows: value[rows, ...]")
            first = None
        if isinstance(first, (int, np.integer)):
            return self.read([first])[(0, *rest)]
        rows = self.read(first)
        return rows[(slice(None), *rest)] if rest else rows

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.read(), dtype)

    def read(self, rows=None, raw: bool = False) -> np.ndarray:
        """These rows (default: all), in the order asked. Whole chunks are read, each once."""
        span = _as_span(rows, len(self))
        if span is not None:
            out = np.empty((span[1] - span[0], *self.row_shape), self.stored_dtype)
            for i, begin, end, at in _segment_spans(self.first, *span):
                self.read_segment(i, begin, out[at : at + end - begin])
        else:
            numbers = _row_numbers(rows, len(self))
            out = np.empty((len(numbers), *self.row_shape), self.stored_dtype)
            for i, begin, end, which in _by_segment(numbers, self.first, self.chunk_rows):
                part = np.empty((end - begin, *self.row_shape), self.stored_dtype)
                self.read_segment(i, begin, part)
                out[which] = part[numbers[which] - self.first[i] - begin]
        return out if raw or self.dtype != "bfloat16" else widen(out)

    def read_segment(self, segment: int, begin: int, out: np.ndarray):
        """Fills `out` (C order, stored_dtype) with rows from `begin` on of one segment."""
        self.store._files.read(segment, self, begin, out)

    def tensor(self, rows=None):
        """These rows as a torch tensor."""
        return to_tensor(self.read(rows, raw=True), self.dtype)

    def moments(self) -> dict[str, np.ndarray]:
        """Statistics of all rows by column, in float64: "mean", "variance" (shape of a row), "count", "mean_norm"."""
        if not self.is_float:
            raise StoreError(f"{self.path} has no statistics: its elements are {self.dtype}")
        merged: dict[str, Any] = {"mean": 0.0, "m2": 0.0, "count": 0.0, "mean_norm": 0.0, "n_norms": 0.0}
        for i in range(len(self.store.segments)):
            _merge(merged, self.store._files.statistics(i, self))
        count = np.broadcast_to(np.asarray(merged["count"], np.float64), self._width)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean, variance = (np.where(count > 0, x, np.nan) for x in (merged["mean"], merged["m2"] / count))
        return {
            "mean": mean.reshape(self.row_shape),
            "variance": variance.reshape(self.row_shape),
            "count": count.astype(np.int64).reshape(self.row_shape),
            "mean_norm": merged["mean_norm"] if merged["n_norms"] else float("nan"),
        }

    @property
    def _width(self) -> int:
        return int(np.prod(self.row_shape, dtype=np.int64))

    def __repr__(self):
        return f"{self.path}: {list(self.shape)} {self.dtype}, [{self.layout}]"


class _Files:
    """Open segments, the last OPEN_FILES of them; what is read through them is checked against store.json."""

    def __init__(self, store: Store):
        self.store, self.pid, self.left_alone = store, os.getpid(), []
        self.open: OrderedDict[int, tuple[h5py.File, dict[str, tuple]]] = OrderedDict()

    def close(self):
        if self.pid == os.getpid():
            for file, _ in self.open.values():
                file.close()
            self.open.clear()

    def segment(self, i: int) -> tuple[h5py.File, dict[str, tuple]]:
        if self.pid != os.getpid():  # after a fork: the parent's files are not ours to use or to close
            self.left_alone.append(self.open)
            self.open, self.pid = OrderedDict(), os.getpid()
        if i in self.open:
            self.open.move_to_end(i)
            return self.open[i]
        record = self.store.segments[i]
        path = self.store.path / record["file"]
        try:
            file = _open(path)
        except OSError as error:
            raise SegmentError(f"{path}: cannot be opened: {error}") from None
        if file.attrs.get("store_version") != VERSION or file.attrs.get("unit") != record["unit"]:
            found = file.attrs.get("store_version"), file.attrs.get("unit")
            raise SegmentError(f"{path}: store_version and unit are {found}, expected {(VERSION, record['unit'])}")
        while len(self.open) >= OPEN_FILES:
            self.open.popitem(last=False)[1][0].close()
        self.open[i] = file, {}
        return self.open[i]

    def _dataset(self, i: int, path: str, shape: tuple[int, ...], stored: np.dtype, is_float: bool) -> tuple:
        """(dataset, its space, its type) of a segment, checked when first asked for."""
        file, datasets = self.segment(i)
        if path in datasets:
            return datasets[path]
        where = f"{self.store.path / self.store.segments[i]['file']}: /{path}"
        try:
            # Values are read by whole chunks: HDF5 need not keep any. The small tables are read piece by piece.
            data = h5py.Dataset(h5py.h5d.open(file.id, path.encode(), NO_CACHE if len(shape) > 1 else None))
        except (KeyError, TypeError, ValueError):
            raise SegmentError(f"{where} is not there, or is no dataset; store.json lists it") from None
        if data.shape != shape:
            raise SegmentError(f"{where} is {data.shape}, expected {shape}")
        stored_type = data.id.get_type()
        kind, width = stored_type.get_class(), stored_type.get_size()
        if width != stored.itemsize or kind != (h5py.h5t.FLOAT if is_float else h5py.h5t.INTEGER):
            raise SegmentError(
                f"{where} has elements of {width} bytes and of HDF5 class {kind}, store.json says "
                f"{stored.itemsize} bytes, {'a float' if is_float else 'an integer'}"
            )
        datasets[path] = data, data.id.get_space(), stored_type
        return datasets[path]

    def _of_value(self, i: int, value: Value) -> tuple:
        n_rows = int(value.first[i + 1] - value.first[i])
        return self._dataset(i, value.path, (n_rows, *value.row_shape), value.stored_dtype, value.is_float)

    def dataset(self, i: int, value: Value) -> h5py.Dataset:
        return self._of_value(i, value)[0]

    def read(self, i: int, value: Value, begin: int, out: np.ndarray):
        if len(out):
            self._read(i, self._of_value(i, value), begin, out)

    def _read(self, i: int, opened: tuple, begin: int, out: np.ndarray):
        data, space, stored_type = opened
        space.select_hyperslab((begin, *(0,) * (out.ndim - 1)), out.shape)
        # The memory's type is the file's: bfloat16 goes as bits, past HDF5's slow conversion.
        try:
            data.id.read(h5py.h5s.create_simple(out.shape), space, out, mtype=stored_type)
        except OSError as error:
            path = self.store.path / self.store.segments[i]["file"]
            raise SegmentError(f"{path}: {data.name}, rows {begin} to {begin + len(out) - 1}: {error}") from None

    def tables(
        self, i: int, names: Iterable[str], group: str, n_rows: int, begin: int = 0, end: int | None = None
    ) -> dict[str, np.ndarray]:
        end = n_rows if end is None else end
        out = {}
        for name in names:
            dtype = np.dtype(TABLES[name])
            out[name] = np.empty(end - begin, dtype)
            if end > begin:
                self._read(i, self._dataset(i, f"{group}/{name}", (n_rows,), dtype, False), begin, out[name])
        return out

    def statistics(self, i: int, value: Value) -> dict[str, Any]:
        file, _ = self.segment(i)
        where = f"{self.store.path / self.store.segments[i]['file']}: /statistics/{value.path}"
        try:
            group = file[f"statistics/{value.path}"]
            found = {k: group[k][...].astype(np.float64) for k in ("mean", "m2", "count")}
            found |= {k: float(group.attrs[k]) for k in ("mean_norm", "n_norms")}
        except (KeyError, OSError) as error:
            raise SegmentError(f"{where}: {error}") from None
        if any(found[k].shape != (value._width,) for k in ("mean", "m2", "count")):
            raise SegmentError(f"{where}: not {value._width} columns")
        return found


def _open(path: Path) -> h5py.File:
    try:
        return h5py.File(path, "r")
    except OSError as error:
        if "lock" not in str(error):
            raise
    return h5py.File(path, "r", locking=False)  # a file system without locks; the file is whole and never changes


def _merge(into: dict[str, Any], part: dict[str, Any]):
    """Chan's merge of two partial means and sums of squares, as in schemas/store.md; without division by 0."""
    total = into["count"] + part["count"]
    share = np.divide(part["count"], total, out=np.zeros_like(part["mean"]), where=total > 0)
    delta = np.where(part["count"] > 0, part["mean"], 0.0) - into["mean"]
    into["mean"] = into["mean"] + delta * share
    into["m2"] = into["m2"] + np.where(part["count"] > 0, part["m2"], 0.0) + delta**2 * into["count"] * share
    into["count"] = total
    norms = into["n_norms"] + part["n_norms"]
    if part["n_norms"]:
        into["mean_norm"] += (part["mean_norm"] - into["mean_norm"]) * part["n_norms"] / norms
    into["n_norms"] = norms


def widen(bits: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """bfloat16's bits as float32."""
    out = np.empty(bits.shape, np.float32) if out is None else out
    wide = out.view(np.uint32)
    wide[...] = bits
    wide <<= 16
    return out


def to_tensor(array: np.ndarray, dtype: str):
    """A torch tensor over the array's memory; the bits of a bfloat16 value become torch.bfloat16 as they are."""
    import torch

    if dtype == "bfloat16" and array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


# ---------------------------------------------------------------- rows


def _as_span(rows, n: int) -> tuple[int, int] | None:
    """(begin, end) where rows are all rows or a slice without a step."""
    if rows is None:
        return 0, n
    if isinstance(rows, range):
        inside = rows.step == 1 and (not len(rows) or (rows.start >= 0 and rows.stop <= n))
        return (rows.start, max(rows.start, rows.stop)) if inside else None
    if isinstance(rows, slice) and rows.step in (None, 1):
        begin, end, _ = rows.indices(n)
        return begin, max(begin, end)
    return None


def _row_numbers(rows, n: int) -> np.ndarray:
    if rows is None:
        rows = slice(None)
    if isinstance(rows, slice):
        return np.arange(*rows.indices(n), dtype=np.int64)
    if isinstance(rows, (int, np.integer)):
        rows = [rows]
    if not hasattr(rows, "__array__"):
        rows = list(rows)
    numbers = np.asarray(rows)
    if numbers.dtype == bool:
        if numbers.shape != (n,):
            raise IndexError(f"a mask of shape {numbers.shape} over {n} rows")
        return np.flatnonzero(numbers)
    if numbers.size and not np.issubdtype(numbers.dtype, np.integer) or numbers.ndim != 1:
        raise IndexError(f"rows are integers, a slice or a mask, not {numbers.dtype} of shape {numbers.shape}")
    numbers = numbers.astype(np.int64)
    if numbers.size and (numbers.min() < -n or numbers.max() >= n):
        raise IndexError(f"row {numbers.min() if numbers.min() < -n else numbers.max()} of {n} rows")
    return np.where(numbers < 0, numbers + n, numbers)


def _segment_spans(first: np.ndarray, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(segment, first and last + 1 row in it, offset from begin) of rows [begin, end)."""
    i = int(np.searchsorted(first, begin, "right")) - 1
    at = begin
    while at < end:
        stop = min(end, int(first[i + 1]))
        if stop > at:
            yield i, at - int(first[i]), stop - int(first[i]), at - begin
        at, i = stop, i + 1


def _by_segment(numbers: np.ndarray, first: np.ndarray, chunk_rows: int = 1 << 16):
    """(segment, rows [begin, end) of it to read, places in numbers) for each chunk that the row numbers touch."""
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    segment = np.searchsorted(first, ordered, "right") - 1
    local = ordered - first[segment]
    chunk = local // chunk_rows
    cuts = np.flatnonzero((np.diff(segment) != 0) | (np.diff(chunk) != 0)) + 1
    for a, b in zip([0, *cuts], [*cuts, len(ordered)]):
        if b > a:
            yield int(segment[a]), int(local[a]), int(local[b - 1]) + 1, order[a:b]


def _matches(column: np.ndarray, condition) -> np.ndarray:
    if callable(condition):
        return np.asarray(condition(column), bool)
    if isinstance(condition, (int, np.integer)):
        return column == condition
    if isinstance(condition, slice):
        step = 1 if condition.step is None else condition.step
        start = 0 if condition.start is None else condition.start
        if start < 0 or step < 1 or (condition.stop is not None and condition.stop < 0):
            raise ValueError(f"a filter's slice counts up from 0 or more: {condition}")
        inside = (column >= start) & ((column - start) % step == 0)
        return inside if condition.stop is None else inside & (column < condition.stop)
    return np.isin(column, condition if hasattr(condition, "__array__") else list(condition))


def _joined(parts: list[np.ndarray], dtype=np.int64) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


# ---------------------------------------------------------------- store.json


def _need_zstd(path: Path):
    try:
        import hdf5plugin  # noqa: F401  (registers the filter)
    except ImportError as error:
        reason = f" ({error})"
    else:
        reason = ""
    if not h5py.h5z.filter_avail(ZSTD_FILTER):
        raise MissingPlugin(
            f"{path} is compressed with zstd, for which HDF5 has no filter here{reason}: pip install hdf5plugin"
        )


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        info = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}: not a store's folder?") from None
    except ValueError as error:
        raise StoreError(f"{path}: not JSON: {error}") from None
    if not isinstance(info, dict) or info.get("kind") != "actdump store":
        raise StoreError(f'{path}: kind is not "actdump store"')
    if info.get("version") != VERSION:
        raise VersionError(
            f"{path}: version {info.get('version')!r}; this package reads version {VERSION}: "
            f"install the one that came with the program that wrote the store"
        )
    wanted = {
        "complete": bool,
        "totals": dict,
        "model": dict,
        "compression": dict,
        "captures": list,
        "datasets": list,
        "unit_start": list,
        "segments": list,
    }
    for key, kind in wanted.items():
        if not isinstance(info.get(key), kind):
            raise StoreError(f"{path}: {key} is not {kind.__name__}")
    info.setdefault("statistics", None)
    for segment in info["segments"]:
        if not isinstance(segment, dict) or not re.fullmatch(r"segments/[0-9]{6,}\.h5", str(segment.get("file"))):
            raise StoreError(f"{path}: a segment is not a file of segments/: {segment!r}"[:300])
        for key in ("unit", "first_sequence", "n_sequences", "bytes"):
            if not isinstance(segment.get(key), int) or segment[key] < 0:
                raise StoreError(f"{path}: {key} of {segment['file']} is {segment.get(key)!r}")
    return info


def _some(names: list[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _size(n_bytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:,.3g} TB"
