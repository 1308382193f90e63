"""With corpus.carry, windows of 7, 64 and 1000 tokens over long documents give the values of one run."""
import numpy as np
import pytest

import harness

LENGTHS = [310, 5, 64, 1, 133]
# What a window has once, or what it says of the window itself, is not the same from another cut.
OF_THE_WINDOW = ("next_token_probs", "input_size", "state_input", "state_output")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return harness.write_corpus(tmp_path_factory.mktemp("corpus") / "tokens", harness.random_documents(2, LENGTHS))


def run(folder, corpus, case, context, carry, **options):
    folder.mkdir()
    job, store = harness.make_job(folder, checkpoint=harness.FIXTURES / case, corpus=corpus, context=context,
                                  corpus_options={"carry": True} if carry else None,
                                  run={"threads": 1, "batch_tokens": 96}, **options)
    harness.actdump("run", job).expect(harness.OK)
    return store


def by_token(store):
    """{path: rows} in the order of (document, position in the document)."""
    with harness.open_store(store) as file:
        starts = file["sequences/start"][...][file["everything/rows/sequence"][...]]
        documents = file["sequences/document"][...][file["everything/rows/sequence"][...]]
    values = harness.read_values(store)
    order = np.lexsort((starts + values["rows/position"], documents))
    return {path: data[order] for path, data in values.items() if path.rsplit("/")[-1] not in OF_THE_WINDOW
            and not path.startswith("rows/")}


def close(path, got, want):
    if path.endswith(("attention_scores", "attention_probabilities")):  # the key axis is as long as the longest run
        keys = min(got.shape[-1], want.shape[-1])
        got, want = got[..., :keys], want[..., :keys]
    shown = np.isfinite(want)
    assert np.array_equal(np.isfinite(got), shown), path
    assert np.abs(got[shown] - want[shown]).max(initial=0) <= 1e-4 * max(1.0, np.abs(want[shown]).max(initial=0)), path


@pytest.mark.parametrize("case", ["mamba", "jamba", "bamba", "laguna"])
def test_windows_that_carry_on_are_one_run(case, corpus, tmp_path):
    whole = by_token(run(tmp_path / "whole", corpus, case, 320, False))
    for context in (7, 64, 1000):
        windows = by_token(run(tmp_path / str(context), corpus, case, context, True))
        assert windows.keys() == whole.keys()
        for path, values in windows.items():
            close(f"{context}: {path}", values, whole[path])


@pytest.mark.parametrize("case", ["mamba", "jamba", "bamba"])
def test_the_state_that_enters_a_window(case, corpus, tmp_path):
    store = run(tmp_path / "carried", corpus, case, 64, True)
    layer = {"mamba": 1, "jamba": 0, "bamba": 2}[case]
    with harness.open_store(store) as file:
        at = file[f"everything/layers/{layer}/linear_attn"]
        entering, leaving = at["state_input"][...], at["state_output"][...]
        continues, documents = file["sequences/continues"][...], file["sequences/document"][...]
    assert continues.tolist() == [int(i > 0 and documents[i] == documents[i - 1]) for i in range(len(documents))]
    assert continues.sum() == 4 + 2  # documents of 310 and 133 tokens in windows of 64
    for i, goes_on in enumerate(continues):
        wanted = leaving[i - 1] if goes_on else np.zeros_like(leaving[i])
        np.testing.assert_allclose(entering[i], wanted, rtol=1e-5, atol=1e-6)


def test_ranks_share_carried_documents(corpus, tmp_path):
    stores = []
    for ranks in (None, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        job, store = harness.make_job(folder, checkpoint=harness.FIXTURES / "jamba", corpus=corpus, context=16,
                                      corpus_options={"carry": True}, store_options={"unit_tokens": 64},
                                      captures={"all": {"values": ["layer_output"], "layers": "all"}},
                                      run={"threads": 1, "batch_tokens": 32})
        harness.actdump("run", job, ranks=ranks).expect(harness.OK)
        stores.append(harness.segment_bytes(store))
    assert stores[0] == stores[1] and len(stores[0]) >= 3
