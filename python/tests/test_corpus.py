"""Corpora from what people have: ids that come back from `actdump run` are the originals'."""

import gzip
import json

import numpy as np
import pytest

import actdump
import harness
from actdump.corpus import CorpusError, convert, main

DOCUMENTS = [d.tolist() for d in harness.random_documents(3, [5, 1, 40, 0, 33, 2])]


def rows_after_run(folder, stem, checkpoint="mamba", context=32):
    """{document: its ids} of the rows that a run over the corpus stored."""
    job, store = harness.make_job(
        folder,
        checkpoint=harness.FIXTURES / checkpoint,
        corpus=stem,
        context=context,
        captures={"c": {"values": ["layer_output"], "layers": [0]}},
    )
    harness.actdump("run", job).expect(harness.OK)
    with actdump.open(store) as opened:
        rows = opened["c"].rows()
    return {int(d): rows["input_ids"][rows["document"] == d].tolist() for d in np.unique(rows["document"])}


def read_pair(stem):
    idx, raw = stem.with_suffix(".idx").read_bytes(), stem.with_suffix(".bin").read_bytes()
    assert idx[:9] == b"MMIDIDX\x00\x00"
    code, n = idx[17], int.from_bytes(idx[18:26], "little")
    dtype = np.dtype({8: "<u2", 4: "<i4"}[code])
    lengths = np.frombuffer(idx, "<i4", n, 34)
    offsets = np.frombuffer(idx, "<i8", n, 34 + 4 * n)
    assert np.array_equal(np.frombuffer(idx, "<i8", n + 1, 34 + 12 * n), np.arange(n + 1))
    return [np.frombuffer(raw, dtype, length, at).tolist() for length, at in zip(lengths, offsets)]


def expected_rows():
    return {i: d for i, d in enumerate(DOCUMENTS) if d}


def test_json_lines_of_ids(tmp_path):
    lines = "".join(json.dumps(d if i % 2 else {"input_ids": d, "n": 1}) + "\n" for i, d in enumerate(DOCUMENTS))
    (tmp_path / "ids.jsonl").write_text(lines)
    (tmp_path / "ids.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    counts = convert(tmp_path / "ids.jsonl", tmp_path / "corpus")
    assert counts == {"documents": 6, "tokens": 81, "empty": 1, "masked": 0, "dtype": "uint16"}
    convert(tmp_path / "ids.jsonl.gz", tmp_path / "zipped")
    assert read_pair(tmp_path / "corpus") == read_pair(tmp_path / "zipped") == DOCUMENTS
    assert rows_after_run(tmp_path, tmp_path / "corpus") == expected_rows()


@pytest.mark.parametrize("form", ["folder", "dict", "parquet", "fixed"])
def test_a_round_trip_of_the_package_datasets(tmp_path, form):
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    documents = [d[:1] * 20 for d in DOCUMENTS if d] if form == "fixed" else DOCUMENTS
    data = datasets.Dataset.from_dict({"text": ["x"] * len(documents), "input_ids": documents})
    if form == "parquet":
        data.to_parquet(str(tmp_path / "part.parquet"))
        source, split = tmp_path / "part.parquet", None
    elif form == "dict":
        datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(tmp_path / "saved")
        source, split = tmp_path / "saved", "train"
        with pytest.raises(CorpusError, match="--split: train, test"):
            convert(source, tmp_path / "corpus")
    else:
        if form == "fixed":
            data = data.cast_column("input_ids", datasets.Sequence(datasets.Value("int32"), length=20))
        data.save_to_disk(tmp_path / "saved", num_shards=2)
        source, split = tmp_path / "saved", None
    convert(source, tmp_path / "corpus", split=split)
    assert read_pair(tmp_path / "corpus") == documents
    original = datasets.load_from_disk(str(source)) if form in ("folder", "fixed") else data
    assert rows_after_run(tmp_path, tmp_path / "corpus") == {i: d for i, d in enumerate(original["input_ids"]) if d}


def test_the_attention_mask_cuts_padding(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    pq = pytest.importorskip("pyarrow.parquet")
    ids, mask = [[1, 2, 0, 0], [], [0, 0, 3, 0], [0, 0]], [[1, 1, 0, 0], [], [0, 0, 1, 1], [0, 0]]
    pq.write_table(pa.table({"input_ids": ids, "attention_mask": mask}), tmp_path / "a.parquet")
    assert convert(tmp_path / "a.parquet", tmp_path / "corpus")["masked"] == 6
    assert read_pair(tmp_path / "corpus") == [[1, 2], [], [3, 0], []]


def test_text_with_a_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    path = harness.SAMPLE / "tokenizer.json"
    texts = ["In the beginning God created the heaven and the earth.", "", "And God said, Let there be light"]
    wanted = [tokenizers.Tokenizer.from_file(str(path)).encode(t).ids for t in texts]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (tmp_path / "a.txt").write_text("\n".join(texts))
    for name in ("a.jsonl", "a.txt"):
        convert(tmp_path / name, tmp_path / "corpus", tokenizer=path, force=True)
        assert read_pair(tmp_path / "corpus") == wanted
    convert(tmp_path / "a.txt", tmp_path / "corpus", tokenizer=path, end_id=0, force=True)
    assert read_pair(tmp_path / "corpus") == [w + [0] for w in wanted]
    assert rows_after_run(tmp_path, tmp_path / "corpus", harness.SAMPLE / "mamba") == dict(
        enumerate(read_pair(tmp_path / "corpus"))
    )


def test_large_ids_widen_what_was_written(tmp_path):
    documents = [[1, 2, 65535]] * 1500 + [[65536, 3], [2**31 - 1]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(d) + "\n" for d in documents))
    assert convert(tmp_path / "a.jsonl", tmp_path / "corpus")["dtype"] == "int32"
    assert read_pair(tmp_path / "corpus") == documents


BAD = {
    "not json": ("a.jsonl", "[1, 2]\n[3,\n", "a.jsonl:2: not JSON"),
    "a negative id": ("a.jsonl", "[1, -2]\n", "a.jsonl:1: id -2 is not in 0 to"),
    "a huge id": ("a.jsonl", f"[1, {2**70}]\n", f"id {2**70}"),
    "not integers": ("a.jsonl", "[1, 2.5]\n", "not a list of integers"),
    "booleans": ("a.jsonl", "[true]\n", "not a list of integers"),
    "no field": ("a.jsonl", '{"text": "x"}\n', "text needs --tokenizer"),
    "text alone": ("a.txt", "x\n", "text needs --tokenizer"),
    "an unknown kind": ("a.csv", "1,2\n", "not a .parquet"),
    "a broken parquet": ("a.parquet", "PAR1 and more", "a.parquet: "),
    "nothing there": ("b.jsonl", None, "not there"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_said_and_leaves_nothing(tmp_path, capsys, name):
    file, text, words = BAD[name]
    if file.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    if text is not None:
        (tmp_path / file).write_text(text)
    assert main([str(tmp_path / file), str(tmp_path / "out")]) == 3
    assert words in capsys.readouterr().err
    assert {p.name for p in tmp_path.iterdir()} <= {file}


def test_nothing_is_written_over(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("[1]\n")
    assert main([str(tmp_path / "a.jsonl"), str(tmp_path / "out")]) == 0
    assert "1 documents, 1 tokens as uint16" in capsys.readouterr().out
    assert main([str(tmp_path / "a.jsonl"), str(tmp_path / "out")]) == 3
    assert "--force" in capsys.readouterr().err
    assert main([str(tmp_path / "a.jsonl"), str(tmp_path / "out"), "--force"]) == 0
