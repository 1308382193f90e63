"""The torch datasets: workers of every start method, ranks, resuming."""

import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
from torch.utils.data import DataLoader, IterableDataset  # noqa: E402

import actdump  # noqa: E402
from actdump.training import Batches, Loader, RowDataset  # noqa: E402

STREAM = "residuals/layers/3/layer_output"
POOL = 3000 * 256


@pytest.fixture(scope="module", autouse=True)
def quick_forkserver():
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload(["actdump.training"])


def bits(tensor):
    return tensor.view(torch.int16).numpy().view(np.uint16)


PLACES = [(n_ranks, rank) for n_ranks in (1, 2, 3) for rank in range(n_ranks)]


class Several(IterableDataset):
    """Datasets one after the other: workers that take seconds to start serve all ranks."""

    def __init__(self, parts):
        self.parts = parts

    def __iter__(self):
        for i, part in enumerate(self.parts):
            for batch in part:
                yield i, batch


def options_of(n_ranks, rank):
    return dict(batch_size=256, seed=1, rank=rank, n_ranks=n_ranks, tables=True, pool_bytes=POOL)


@pytest.fixture(scope="module")
def spawned(sample):
    """spawned(workers): {(n_ranks, rank): batches}. A spawned worker imports torch anew: each is started once."""

    @functools.cache
    def read(workers):
        store, found = actdump.open(sample), {place: [] for place in PLACES}
        parts = [Batches(store, [STREAM], **options_of(*place)) for place in PLACES]
        data = DataLoader(Several(parts), batch_size=None, num_workers=workers, multiprocessing_context="spawn")
        for i, batch in data:
            found[PLACES[i]].append({k: x.clone() for k, x in batch.items()})
        return found

    return read


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "method,workers", [(None, 0)] + [(m, n) for m in ("fork", "spawn", "forkserver") for n in (1, 4)]
)
def test_the_union_is_the_store(sample, spawned, method, workers, n_ranks):
    store = actdump.open(sample)
    whole, numbers, rows, steps = store[STREAM].read(raw=True), [], [], set()
    assert len(store[STREAM][:5])  # files are open when workers are forked
    for rank in range(n_ranks):
        loader = Loader(
            store, [STREAM], num_workers=workers, multiprocessing_context=method, **options_of(n_ranks, rank)
        )
        batches = spawned(workers)[n_ranks, rank] if method == "spawn" else list(loader)
        assert len(batches) == len(loader) and all(b[STREAM].dtype == torch.bfloat16 for b in batches)
        steps.add(len(batches))
        numbers += [b["row"].numpy() for b in batches]
        rows += [bits(b[STREAM]) for b in batches]
    numbers = np.concatenate(numbers)
    assert np.array_equal(np.sort(numbers), np.arange(len(whole))) and len(steps) == 1
    assert np.array_equal(np.concatenate(rows), whole[numbers])
    assert np.mean(numbers == np.arange(len(whole))) < 0.01


def test_the_loader_spawns_its_workers(sample):
    store = actdump.open(sample)
    batches = list(Loader(store, [STREAM], num_workers=1, multiprocessing_context="spawn", **options_of(1, 0)))
    here = list(Loader(store, [STREAM], **options_of(1, 0)))
    assert len(batches) == len(here) and all(torch.equal(a["row"], b["row"]) for a, b in zip(batches, here))
    assert all(torch.equal(a[STREAM], b[STREAM]) for a, b in zip(batches, here))


def orders(loader, n=1):
    return [[b["row"].tolist() for b in loader] for _ in range(n)]


def test_the_seed_and_the_epoch_give_the_order(sample):
    store = actdump.open(sample)
    make = lambda seed: Loader(store, [STREAM], 512, seed=seed, tables=True, num_workers=2, pool_bytes=POOL)
    first, again, other = orders(make(1), 2), orders(make(1), 2), orders(make(2), 1)
    assert first == again and first[0] != first[1] and first[0] != other[0]
    assert sorted(sum(first[0], [])) == sorted(sum(first[1], [])) == sorted(sum(other[0], []))


@pytest.mark.parametrize("workers", [0, 3])
def test_a_loop_that_was_stopped_goes_on(sample, workers):
    store = actdump.open(sample)
    options = dict(batch_size=512, seed=4, tables=True, num_workers=workers, pool_bytes=POOL)
    whole = orders(Loader(store, [STREAM], **options), 2)
    loader, before = Loader(store, [STREAM], **options), []
    for batch in loader:
        before.append(batch["row"].tolist())
        if len(before) == 7:
            break
    state = loader.state_dict()
    later = Loader(actdump.open(sample), [STREAM], **options)
    later.load_state_dict(state)
    assert [before + orders(later)[0], orders(later)[0]] == whole
    other = Loader(store, [STREAM], **{**options, "batch_size": 100})
    with pytest.raises(actdump.StoreError, match="batch_size is 100, was 512"):
        other.load_state_dict(state)


def test_map_style(sample):
    store = actdump.open(sample)
    where = store["residuals"].select(positions=slice(1, None))
    data = RowDataset(store, [STREAM, "residuals/layers/1/layer_output"], where=where, tables=True, cache_bytes=1 << 20)
    assert len(data) == len(where)
    item = data[-3]
    assert item["row"] == where[-3] and np.array_equal(bits(item[STREAM]), store[STREAM].read([where[-3]], raw=True)[0])
    with pytest.raises(IndexError):
        data[len(data)]
    for loader in (DataLoader(data, batch_size=300, num_workers=2), DataLoader(data, batch_sampler=data.sampler(300))):
        batches = list(loader)
        numbers = np.concatenate([b["row"].numpy() for b in batches])
        assert np.array_equal(np.sort(numbers), where)
        assert np.array_equal(np.concatenate([bits(b[STREAM]) for b in batches]), store[STREAM].read(numbers, raw=True))
    assert np.mean(numbers == where) < 0.05  # the sampler's order


def test_iterable_in_a_plain_dataloader(sample):
    data = Batches(actdump.open(sample), [STREAM], 1000, normalise="norm")
    x = torch.cat([b[STREAM] for b in DataLoader(data, batch_size=None)])
    assert x.dtype == torch.float32 and x.norm(dim=1).mean().item() == pytest.approx(128**0.5, rel=1e-4)
