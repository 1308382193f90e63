"""The number of ranks never shows in a store: the same bytes from 1, 2 and 3.

What may change a bit is named by store.json's "run": batch_tokens moves a product's rows to another place in a batch,
and the library may then add up in another order; that is held to 1e-5 of a dataset's largest number here."""
import numpy as np
import pytest

import harness

LENGTHS = [3, 40, 1, 17, 64, 5, 90, 12, 33, 2, 71, 28, 9, 50, 6, 64, 30, 1, 44, 80]
UNIT = {"unit_tokens": 128}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return harness.write_corpus(tmp_path_factory.mktemp("corpus") / "tokens", harness.random_documents(5, LENGTHS))


def run(folder, corpus, case, ranks=None, run=None, **options):
    folder.mkdir(exist_ok=True)
    job, store = harness.make_job(folder, checkpoint=harness.FIXTURES / case, corpus=corpus, context=64,
                                  store_options=UNIT, run={"threads": 1, **(run or {})}, **options)
    harness.actdump("run", job, ranks=ranks).expect(harness.OK)
    return store


def lasting(store):
    """store.json without what tells of this run alone."""
    return {k: v for k, v in harness.manifest(store).items() if k not in ("run", "summary")}


@pytest.mark.parametrize("case", ["mamba", "mamba-bf16", "jamba", "bamba-bf16", "laguna"])
def test_any_number_of_ranks_gives_the_same_bytes(case, corpus, tmp_path):
    stores = {ranks: run(tmp_path / str(ranks), corpus, case, ranks) for ranks in (None, 1, 2, 3)}
    reference = harness.segment_bytes(stores[None])
    assert len(reference) >= 5
    for ranks, store in stores.items():
        got = harness.segment_bytes(store)
        assert got.keys() == reference.keys(), ranks
        assert [name for name in got if got[name] != reference[name]] == [], f"{ranks} ranks"
        assert lasting(store) == lasting(stores[None]), ranks


def test_more_ranks_than_units(corpus, tmp_path):
    options = {"corpus_options": {"limit": 2}}
    one, three = (run(tmp_path / str(n), corpus, "mamba", n, **options) for n in (None, 3))
    assert len(harness.segments(one)) == 1
    assert harness.segment_bytes(one) == harness.segment_bytes(three)


@pytest.mark.parametrize("case", ["mamba", "jamba", "bamba", "laguna"])
def test_batch_tokens_change_values_by_rounding_at_most(case, corpus, tmp_path):
    stores = [run(tmp_path / str(n), corpus, case, run={"batch_tokens": n}) for n in (7, 64, 4096)]
    wanted = harness.read_values(stores[-1])
    for store in stores[:-1]:
        for path, values in harness.read_values(store).items():
            assert_close(path, values, wanted[path])


def assert_close(path, got, want):
    if not np.issubdtype(want.dtype, np.floating):
        assert np.array_equal(got, want), path
        return
    shown = np.isfinite(want)
    assert np.array_equal(np.isfinite(got), shown), path
    scale = np.abs(want[shown]).max(initial=1e-30)
    assert np.abs(got[shown] - want[shown]).max(initial=0) <= 1e-5 * scale, path


def test_the_same_batch_tokens_on_other_ranks_give_the_same_bytes(corpus, tmp_path):
    for tokens in (7, 300):
        one, two = (run(tmp_path / f"{tokens}-{n}", corpus, "mamba", n, run={"batch_tokens": tokens}) for n in (1, 2))
        assert harness.segment_bytes(one) == harness.segment_bytes(two), tokens


def test_a_failing_rank_is_told_once_and_stops_all(corpus, tmp_path):
    """An id past the embedding, in a late unit: whichever rank meets it, every rank ends with the same status."""
    documents = harness.random_documents(5, LENGTHS)
    documents[-1][7] = 97
    broken = harness.write_corpus(tmp_path / "broken", documents)
    job, store = harness.make_job(tmp_path, checkpoint=harness.FIXTURES / "mamba", corpus=broken, context=64,
                                  store_options=UNIT, run={"threads": 1})
    outcome = harness.actdump("run", job, ranks=3, timeout=60)
    assert outcome.status == harness.INPUT, outcome.text
    assert outcome.err.count("97") >= 1 and outcome.err.count("document 19") == 1, outcome.err
    assert not harness.looks_whole(store)
