"""Resident memory does not grow with the corpus."""
import numpy as np
import pytest

import harness

MIB = 1 << 20
ALLOWED_GROWTH = 4 * MIB
CAPTURES = {"residuals": {"values": ["layer_output", "logits"], "layers": [1]},
            "states": {"values": ["linear_attn/state"], "layers": [0], "positions": "last"}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(peak in bytes, store) of a run over a corpus and over one ten times as long."""
    peaks = []
    for times in (1, 10):
        folder = tmp_path_factory.mktemp(f"times{times}")
        rng = np.random.default_rng(1)
        lengths = np.tile(rng.integers(1, 400, 400), times)
        corpus = harness.write_corpus(folder / "tokens", [rng.integers(0, 97, n) for n in lengths])
        job, store = harness.make_job(folder, checkpoint=harness.FIXTURES / "mamba", corpus=corpus, context=256,
                                      captures=CAPTURES)
        peaks.append((harness.peak_memory("run", job), store))
    return peaks


def check_growth(small, large):
    assert small > 8 * MIB  # the measure measures something
    assert large - small < ALLOWED_GROWTH, f"{small / MIB:.1f} MiB, then {large / MIB:.1f} MiB"


def test_ten_times_the_corpus_takes_no_more_memory(runs):
    (small, _), (large, _) = runs
    check_growth(small, large)


def test_nor_does_checking_the_store(runs):
    check_growth(*(harness.peak_memory("verify", store) for _, store in runs))
