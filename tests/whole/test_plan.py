"""The bill beforehand: raw bytes exact, memory within a tenth of what a run takes."""
import re

import pytest

import harness

SAMPLE_JOBS = ["sample-mamba", "sample-jamba"]


def plan(*arguments):
    return harness.actdump("plan", *arguments).expect(harness.OK).out


@pytest.mark.parametrize("name", SAMPLE_JOBS)
def test_rows_and_raw_bytes_are_exact(name, tmp_path):
    sets = ("--set", f"store.path={tmp_path / 'store'}", "--set", "corpus.limit=7")
    said = plan(harness.ROOT / f"configs/{name}.json", *sets)
    harness.actdump("run", harness.ROOT / f"configs/{name}.json", *sets).expect(harness.OK)
    raw, rows = 0, {}
    with harness.open_store(tmp_path / "store") as file:
        for capture in harness.manifest(tmp_path / "store")["job"]["captures"]:
            rows[capture] = len(file[capture]["rows/sequence"])
            for path in harness.value_paths(file[capture]):
                data = file[capture][path]
                raw += data.size * data.dtype.itemsize if data.id.get_type().get_size() == data.dtype.itemsize \
                    else data.size * data.id.get_type().get_size()
    assert int(re.search(r"total: (\d+) bytes raw", said)[1]) == raw
    for capture, n in rows.items():
        assert f"capture {capture}: {n} rows" in said
    units = len(harness.segments(tmp_path / "store"))
    assert f"in {units} segments" in said


@pytest.mark.skipif(harness.SANITIZED, reason="a sanitizer's memory is not the program's")
@pytest.mark.parametrize("name", SAMPLE_JOBS)
def test_memory_is_as_planned(name, tmp_path):
    job = harness.ROOT / f"configs/{name}.json"
    sets = ("--set", f"store.path={tmp_path / 'store'}", "--set", "run.threads=2")
    planned = int(re.search(r"on the host: about (\d+) bytes", plan(job, *sets))[1])
    measured = harness.peak_memory("run", job, *sets)
    assert 0.9 * measured <= planned <= 1.1 * measured, f"planned {planned}, measured {measured}"


def test_measure_says_how_long(tmp_path):
    said = plan(harness.ROOT / "configs/sample-mamba.json", "--measure=1", "--set", "corpus.limit=3")
    assert re.search(r"measured: \d+ tokens/s a rank", said)


def test_many_files_are_said(tmp_path):
    corpus = harness.write_corpus(tmp_path / "tokens", harness.random_documents(1, [4] * 5000))
    job, _ = harness.make_job(tmp_path, checkpoint=harness.FIXTURES / "mamba", corpus=corpus,
                              store_options={"unit_tokens": 4})
    assert "store.unit_tokens" in plan(job)
