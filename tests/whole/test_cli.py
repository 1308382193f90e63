"""The command line: help, usage errors, and commands that need neither weights nor MPI."""
import json
import shutil

import pytest

import harness

COMMANDS = ["run", "plan", "values", "info", "verify", "index"]
# With this, MPI_Init fails: a command that still works did not call it.
NO_MPI = {"OMPI_MCA_pml": "there_is_no_such_component"}


@pytest.fixture
def config_only(tmp_path):
    """A checkpoint folder without weights."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    shutil.copy(harness.FIXTURES / "mamba/config.json", folder)
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(name):
    outcome = harness.actdump(name, "--help", env=NO_MPI).expect(harness.OK)
    assert f"actdump {name}" in outcome.out and len(outcome.out) > 80
    assert outcome.err == ""


def test_help_lists_the_commands():
    outcome = harness.actdump("--help", env=NO_MPI).expect(harness.OK)
    for name in COMMANDS:
        assert f"\n  {name}" in outcome.out or f"actdump {name}" in outcome.out, name


def test_version():
    assert harness.actdump("--version", env=NO_MPI).expect(harness.OK).out.startswith("actdump ")


USAGE = {
    "nothing": ([], "usage"),
    "an unknown command": (["rum", "job.json"], "rum"),
    "an unknown option": (["run", "--frobnicate", "job.json"], "--frobnicate"),
    "no job": (["run"], "run takes one argument, not 0"),
    "two jobs": (["run", "a.json", "b.json"], "run takes one argument, not 2"),
    "no store": (["info"], "info takes one argument"),
    "no store to verify": (["verify"], "verify takes one argument"),
    "no checkpoint": (["values"], "values takes one argument"),
    "a job that is not there": (["run", "job.json"], "job.json"),
    "--set without its value": (["run", "job.json", "--set"], "--set"),
    "--set without =": (["plan", str(harness.ROOT / "configs/sample-mamba.json"), "--set", "store.path"], "store.path"),
    "an unknown log level": (["run", "job.json", "--log-level", "loud"], "loud"),
    "an unknown log format": (["run", "job.json", "--log-format", "xml"], "xml"),
}


@pytest.mark.parametrize("name", USAGE)
def test_usage_errors(name, tmp_path):
    arguments, word = USAGE[name]
    outcome = harness.actdump(*arguments, cwd=tmp_path).expect(harness.USAGE)
    assert word.lower() in outcome.err.lower(), outcome.err
    assert outcome.out == ""


def test_values_needs_neither_weights_nor_mpi(config_only):
    out = harness.actdump("values", config_only, env=NO_MPI).expect(harness.OK).out
    for word in ("mamba", "layer_output", "linear_attn/states", "logits"):
        assert word in out
    # What the family lacks comes with its reason.
    assert "layer_mid" in out and "one sublayer" in out


@pytest.mark.parametrize("case,words", [
    ("jamba", ["attention", "moe", "dense", "mlp/expert_neurons"]),
    ("bamba", ["attention", "self_attn/attention_scores"]),
    ("laguna", ["sliding", "full", "moe", "dense", "mlp/shared_experts/mlp_neurons"]),
])
def test_values_shows_the_blocks_of_the_family(case, words):
    out = harness.actdump("values", harness.FIXTURES / case, env=NO_MPI).expect(harness.OK).out
    assert all(word in out for word in words), out


def test_plan_needs_neither_weights_nor_mpi(config_only, tmp_path):
    captures = {"residuals": {"values": ["layer_output"], "layers": [0, 2]}}
    job, store = harness.case_job(tmp_path, "mamba", checkpoint=config_only, captures=captures)
    out = harness.actdump("plan", job, env=NO_MPI).expect(harness.OK).out
    assert "residuals" in out and "layer_output" in out
    assert "38" in out  # rows: the case's four sequences of 13, 1, 21 and 3 tokens
    assert not store.exists()


def test_set_overrides_one_key(tmp_path):
    captures = {"residuals": {"values": ["layer_output"], "layers": [0]}}
    job, store = harness.case_job(tmp_path, "mamba", captures=captures)
    other = tmp_path / "elsewhere"
    harness.actdump("run", job, "--set", f"store.path={other}", "--set", "captures.residuals.layers=[1,2]",
                    "--set", "corpus.limit=2", "--quiet").expect(harness.OK)
    assert not store.exists()
    with harness.open_store(other) as file:
        assert list(file["residuals/layers"]) == ["1", "2"]
        assert len(file["sequences/length"]) == 2
    assert harness.manifest(other)["job"]["corpus"]["limit"] == 2


def test_quiet_says_nothing_and_the_log_can_be_json(tmp_path):
    job, _ = harness.case_job(tmp_path, "mamba")
    assert harness.actdump("run", job, "--quiet").expect(harness.OK).text == ""
    job, _ = harness.case_job(tmp_path, "mamba", store="second")
    outcome = harness.actdump("run", job, "--log-format", "json", "--log-level", "debug").expect(harness.OK)
    lines = [line for line in outcome.err.splitlines() if line.strip()]
    assert lines and all(isinstance(json.loads(line), dict) for line in lines)


def test_a_finished_job_run_again_does_nothing_and_says_so(tmp_path):
    job, store = harness.case_job(tmp_path, "mamba")
    harness.actdump("run", job).expect(harness.OK)
    before = {p: p.stat().st_mtime_ns for p in harness.segments(store)}
    outcome = harness.actdump("run", job).expect(harness.OK)
    assert {p: p.stat().st_mtime_ns for p in harness.segments(store)} == before
    assert "complete" in outcome.text or "nothing" in outcome.text


def test_info_says_what_is_there_and_how_to_read_it(mamba_store):
    out = harness.actdump("info", mamba_store, env=NO_MPI).expect(harness.OK).out
    for word in ("everything", "layer_output", "h5py", "hdf5plugin", "store.h5"):
        assert word in out, word


def test_info_of_something_else(tmp_path):
    harness.actdump("info", tmp_path).expect(harness.INPUT)
    harness.actdump("info", tmp_path / "nowhere").expect(harness.INPUT)


def test_index_rebuilds_store_h5(mamba_store, tmp_path):
    import numpy as np
    store = shutil.copytree(mamba_store, tmp_path / "store")
    before = harness.read_values(store)
    (store / "store.h5").unlink()
    harness.actdump("index", store, env=NO_MPI).expect(harness.OK)
    after = harness.read_values(store)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[k], after[k], equal_nan=True) for k in before)
    harness.actdump("verify", store).expect(harness.OK)
