"""Sequences packed into one batch do not touch each other.

Bit for bit, but for mixtures of experts: there other sequences' choices decide in which row of an expert's product a token
lies, and with that in which order the library adds up; what is left is rounding."""
import numpy as np
import pytest

import harness
from test_ranks import assert_close

CASES = ["mamba", "mamba-bf16", "jamba", "jamba-dense-tied", "bamba", "laguna"]
MIXTURES = ["jamba", "laguna"]
LENGTHS = [11, 30, 1, 19, 25]
ONE_BATCH = {"run": {"batch_tokens": 4096}, "context": 32}


def values_by_document(folder, case, documents):
    """[{path: rows} for each document], the whole corpus run in one batch."""
    folder.mkdir()
    corpus = harness.write_corpus(folder / "tokens", documents)
    job, store = harness.make_job(folder, checkpoint=harness.FIXTURES / case, corpus=corpus, **ONE_BATCH)
    harness.actdump("run", job).expect(harness.OK)
    values = harness.read_values(store)
    sequence = values.pop("rows/sequence")
    return [{path: data[sequence == k] if len(data) == len(sequence) else data[[k]] for path, data in values.items()}
            for k in range(len(documents))]


@pytest.mark.parametrize("case", CASES)
def test_changing_a_token_of_one_leaves_the_others_as_they_were(case, tmp_path):
    documents = harness.random_documents(11, LENGTHS)
    before = values_by_document(tmp_path / "before", case, documents)
    for changed, at in ((0, 10), (1, 0), (1, 15), (3, 18)):
        others = [d.copy() for d in documents]
        others[changed][at] = (others[changed][at] + 1) % 97
        after = values_by_document(tmp_path / f"{changed}-{at}", case, others)
        for k in (k for k in range(len(documents)) if k != changed):
            for path, wanted in before[k].items():
                if case in MIXTURES:
                    assert_close(path, after[k][path], wanted)
                else:
                    assert np.array_equal(after[k][path], wanted, equal_nan=True), f"{path} of document {k} after {changed}"
        moved = [p for p in before[changed] if not np.array_equal(after[changed][p], before[changed][p], equal_nan=True)]
        assert len(moved) > len(before[changed]) / 2


@pytest.mark.parametrize("case", ["mamba", "jamba", "bamba", "laguna"])
def test_the_place_in_a_batch_changes_rounding_at_most(case, tmp_path):
    """A document alone, first, in the middle and last."""
    rng = np.random.default_rng(3)
    one = rng.integers(0, 97, 29)
    rest = harness.random_documents(12, [17, 8, 31, 5])
    wanted = values_by_document(tmp_path / "alone", case, [one])[0]
    for name, at in (("first", 0), ("middle", 2), ("last", 4)):
        documents = rest[:at] + [one] + rest[at:]
        for path, got in values_by_document(tmp_path / name, case, documents)[at].items():
            assert_close(path, got, wanted[path])
