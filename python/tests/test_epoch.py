"""The order of an epoch: each row once whatever the ranks and workers, mixed, resumable. Without torch."""

import multiprocessing
from functools import partial

import numpy as np
import pytest

import actdump
from actdump.epoch import Epoch, Lender, Normalisation, Rows

STREAM = "residuals/layers/3/layer_output"
SMALL_POOL = 3000 * 256  # rows of 128 bfloat16


def read_worker(path, options, worker, n_workers, position=0):
    """[row numbers, bits of the values] of a worker's batches; runs in a process of its own."""
    rows = Rows(actdump.open(path), [STREAM], tables=True)
    return [(b["row"], b[STREAM]) for b in Epoch(rows, **options).batches(worker, n_workers, position)]


def run_workers(method, path, options, n_workers):
    if n_workers == 0:
        return [read_worker(path, options, 0, 1)]
    with multiprocessing.get_context(method).Pool(n_workers) as pool:
        return pool.map(partial(read_worker, path, options, n_workers=n_workers), range(n_workers), chunksize=1)


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "method,n_workers", [("", 0)] + [(m, n) for m in ("fork", "spawn", "forkserver") for n in (1, 4)]
)
def test_each_row_once_whatever_the_workers_and_ranks(sample, method, n_workers, n_ranks):
    whole = actdump.open(sample)[STREAM].read(raw=True)
    seen, lengths = [], set()
    for rank in range(n_ranks):
        options = dict(batch_size=100, seed=5, rank=rank, n_ranks=n_ranks, pool_bytes=SMALL_POOL)
        parts = run_workers(method, sample, options, n_workers)
        lengths.add(sum(map(len, parts)))
        seen += [batch for part in parts for batch in part]
    numbers = np.concatenate([n for n, _ in seen])
    assert np.array_equal(np.sort(numbers), np.arange(len(whole)))
    assert np.array_equal(np.concatenate([x for _, x in seen]), whole[numbers])
    assert len(lengths) == 1  # every rank takes as many steps
    assert sum(len(n) < 99 for n, _ in seen) <= n_ranks  # only a rank's last batch may be short


def order_of(rows, **options):
    batches = list(Epoch(rows, 64, pool_bytes=SMALL_POOL, **options).batches())
    return np.concatenate([b["row"] for b in batches])


def test_the_seed_gives_the_order(sample):
    rows = Rows(actdump.open(sample), [STREAM], tables=True)
    one = order_of(rows, seed=1)
    assert np.array_equal(one, order_of(rows, seed=1))
    for other in (order_of(rows, seed=2), order_of(rows, seed=1, epoch=1)):
        assert np.mean(one == other) < 0.01 and np.array_equal(np.sort(one), np.sort(other))
    assert np.array_equal(order_of(rows, shuffle=False), np.arange(len(rows)))


@pytest.mark.parametrize("n_workers,rank,n_ranks", [(1, 0, 1), (3, 0, 1), (4, 1, 2)])
def test_an_epoch_goes_on_from_any_position(sample, n_workers, rank, n_ranks):
    rows = Rows(actdump.open(sample), [STREAM], tables=True)
    epoch = Epoch(rows, 500, seed=3, rank=rank, n_ranks=n_ranks, pool_bytes=SMALL_POOL)

    def dealt(position):
        """As a DataLoader deals batches of its workers: one each in turn, past those that have ended."""
        waiting, out = [epoch.batches(w, n_workers, position) for w in range(n_workers)], []
        while waiting:
            still = []
            for w in waiting:
                batch = next(w, None)
                if batch is not None:
                    out.append(batch)
                    still.append(w)
            waiting = still
        return [b["row"] for b in out]

    whole = dealt(0)
    assert len(whole) == len(epoch) > 5
    for position in (1, 2, 5, len(whole) - 1, len(whole)):
        rest = dealt(position)
        assert len(rest) == len(whole) - position
        assert all(np.array_equal(a, b) for a, b in zip(rest, whole[position:]))


def pairs(documents):
    """Adjacent rows of one document: how many, and how many chance gives in a uniform permutation, with its spread."""
    n = len(documents)
    counts = np.unique(documents, return_counts=True)[1].astype(float)
    same = (counts * (counts - 1)).sum() / (n * (n - 1))
    return int((documents[1:] == documents[:-1]).sum()), (n - 1) * same, np.sqrt((n - 1) * same * (1 - same))


def test_neighbours_share_a_document_no_more_often_than_chance(sample):
    rows = Rows(actdump.open(sample), [STREAM], tables=True)
    for seed in range(5):  # the pool holds the store: a uniform permutation
        found, expected, spread = pairs(np.concatenate([b["document"] for b in Epoch(rows, 64, seed=seed).batches()]))
        assert found < expected + 3.5 * spread, (found, expected, spread)
        assert found > expected - 3.5 * spread
    store_order, expected, _ = pairs(actdump.open(sample)["residuals"].rows()["document"])
    assert store_order > 10 * expected  # the store's own order would not pass


def test_neighbours_in_a_small_pool_are_those_of_its_chunks(sample):
    rows = Rows(actdump.open(sample), [STREAM], tables=True)
    epoch = Epoch(rows, 64, seed=11, pool_bytes=SMALL_POOL)
    documents = np.concatenate([b["document"] for b in epoch.batches()])
    found, by_pool, variance = 0, 0.0, 0.0
    cuts = [epoch.bounds[stop] for _, stop in epoch._pools(0, len(epoch))]
    assert len(cuts) > 4
    for part in np.split(documents, cuts[:-1]):
        same, expected, spread = pairs(part)
        found, by_pool, variance = found + same, by_pool + expected, variance + spread**2
    assert found < by_pool + 3.5 * np.sqrt(variance)
    chunks_a_pool = len(rows.chunk_count) / len(cuts)
    assert found / len(documents) < pairs(documents)[1] / len(documents) + 1.2 / chunks_a_pool


def test_only_the_rows_that_were_selected(sample):
    store = actdump.open(sample)
    some = store["residuals"].select(positions=lambda p: p > 1, tokens=lambda t: t % 3 != 0)
    rows = Rows(store, [STREAM], where=some, tables=True)
    assert len(rows) == len(some) < len(store["residuals"])
    batches = list(Epoch(rows, 128, pool_bytes=SMALL_POOL).batches())
    numbers = np.concatenate([b["row"] for b in batches])
    assert np.array_equal(np.sort(numbers), some)
    assert np.array_equal(np.concatenate([b[STREAM] for b in batches]), store[STREAM].read(numbers, raw=True))
    tables = store["residuals"].rows(numbers)
    assert all(np.array_equal(np.concatenate([b[k] for b in batches]), tables[k]) for k in tables)
    assert len(list(Epoch(Rows(store, [STREAM], where=[]), 4).batches())) == 0


def test_layers_side_by_side(stores):
    """Values of one capture with chunks of other sizes (states are large): the rows of an item belong together."""
    store = actdump.open(stores("jamba"))
    names = ["everything/layers/0/linear_attn/states", "everything/layers/3/layer_output", "everything/input_ids"]
    for batch in Epoch(Rows(store, names, tables=True), 7, seed=1).batches():
        for name in names:
            assert np.array_equal(batch[name], store[name].read(batch["row"]))
            assert batch[name].flags.c_contiguous
        assert np.array_equal(batch["everything/input_ids"], batch["input_ids"])


def test_values_by_sequence_are_items_of_their_own(sample):
    store = actdump.open(sample)
    rows = Rows(store, ["some/next_token_probs"], tables=True)
    got = np.concatenate([b["row"] for b in Epoch(rows, 3).batches()])
    assert np.array_equal(np.sort(got), np.arange(20))
    for others in (["some/next_token_probs", "some/layers/3/layer_output"], [STREAM, "some/layers/3/layer_output"]):
        with pytest.raises(actdump.StoreError, match="do not have the same rows"):
            Rows(store, others)
    with pytest.raises(actdump.StoreError, match="not captures"):
        Rows(store, ["residuals"])


def test_normalisation(sample):
    store = actdump.open(sample)
    x = store[STREAM][:].astype(np.float64)
    for kind, wanted in (("mean", x - x.mean(0)), ("norm", x * np.sqrt(128) / np.linalg.norm(x, axis=1).mean())):
        rows = Rows(store, [STREAM], tables=True, normalise=kind)
        batch = next(Epoch(rows, 1000).batches())
        assert batch[STREAM].dtype == np.float32
        np.testing.assert_allclose(batch[STREAM], wanted[batch["row"]], rtol=1e-5, atol=1e-6)
        back = Normalisation.of(store[STREAM], kind).undo(batch[STREAM])
        np.testing.assert_allclose(back, x[batch["row"]], rtol=1e-5, atol=1e-5)
    assert np.linalg.norm(wanted, axis=1).mean() == pytest.approx(np.sqrt(128))
    with pytest.raises(ValueError, match="one of"):
        Rows(store, [STREAM], normalise="std")


@pytest.mark.parametrize(
    "n,batch_size,n_ranks", [(1, 1, 3), (2, 4, 3), (7, 2, 3), (8, 4, 2), (9, 4, 2), (9, 3, 3), (1, 5, 1)]
)
def test_small_numbers(stores, n, batch_size, n_ranks):
    rows = Rows(actdump.open(stores("mamba")), "everything/layers/0/layer_output", where=np.arange(n), tables=True)
    epochs = [Epoch(rows, batch_size, rank=r, n_ranks=n_ranks) for r in range(n_ranks)]
    assert len({len(e) for e in epochs}) == 1
    parts = [[b["row"] for w in range(2) for b in e.batches(w, 2)] for e in epochs]
    assert all(len(p) == len(e) for p, e in zip(parts, epochs))
    assert sorted(np.concatenate([r for p in parts for r in p])) == list(range(n))


def test_memory_is_used_again_when_nothing_looks_at_it():
    lender, kind = Lender(), np.dtype("<f4")
    first = lender.lend("a", (100, 8), kind)
    place, part = first.ctypes.data, first[10:20]
    del first
    second = lender.lend("a", (100, 8), kind)
    assert second.ctypes.data != place  # a slice of the first is still there
    del part
    assert lender.lend("b", (100, 8), kind).ctypes.data != place
    third = lender.lend("a", (50, 4), kind)
    assert third.ctypes.data == place and third.shape == (50, 4) and third.flags.writeable
    assert lender.lend("a", (0, 4), kind).shape == (0, 4)
    many = [lender.lend("a", (10,), kind) for _ in range(20)]
    del many
    assert len(lender.free["a"]) <= 3
