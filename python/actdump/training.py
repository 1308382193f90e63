"""Torch datasets over a store, and a loader whose epochs can be resumed.

    loader = Loader(store, ["residuals/layers/3/layer_output"], batch_size=4096, num_workers=4)
    for batch in loader:
        x = batch["residuals/layers/3/layer_output"]       # [4096 hidden_size], contiguous
    torch.save({"data": loader.state_dict(), ...})          # and load_state_dict to go on from there

Each pass over the loader is an epoch, in an order of its own that the seed gives. Ranks are torch.distributed's where
that is set up, or given."""

from __future__ import annotations

from collections import OrderedDict
from typing import Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from actdump.epoch import POOL_BYTES, Epoch, Rows
from actdump.errors import StoreError
from actdump.store import Store, to_tensor

__all__ = ["Batches", "Loader", "RowDataset"]


def _tensors(rows: Rows, batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    dtypes = {v.path: v.dtype for v in rows.values}
    return {k: to_tensor(x, dtypes.get(k, "")) for k, x in batch.items()}


def _ranks(rank: int | None, n_ranks: int | None) -> tuple[int, int]:
    if rank is not None and n_ranks is not None:
        return rank, n_ranks
    if rank is not None or n_ranks is not None:
        raise ValueError("give both rank and n_ranks, or neither")
    here = torch.distributed.is_available() and torch.distributed.is_initialized()
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if here else (0, 1)


class Batches(IterableDataset):
    """An epoch as whole batches (give DataLoader batch_size=None). Workers and ranks share it, each row once.

    set_epoch(epoch, position) chooses the epoch and how many batches of it were handed out already. Arguments are those
    of Rows and Epoch."""

    def __init__(
        self,
        store: Store,
        values,
        batch_size: int,
        seed: int = 0,
        where=None,
        tables: bool = False,
        normalise: str | None = None,
        rank: int | None = None,
        n_ranks: int | None = None,
        pool_bytes: int = POOL_BYTES,
        shuffle: bool = True,
    ):
        self.rows = Rows(store, values, where=where, tables=tables, normalise=normalise)
        self.rank, self.n_ranks = _ranks(rank, n_ranks)
        self.options = dict(
            batch_size=batch_size,
            seed=seed,
            rank=self.rank,
            n_ranks=self.n_ranks,
            pool_bytes=pool_bytes,
            shuffle=shuffle,
        )
        self.epoch = self.position = 0

    def set_epoch(self, epoch: int, position: int = 0):
        self.epoch, self.position = epoch, position

    def __len__(self):
        return len(Epoch(self.rows, epoch=self.epoch, **self.options)) - self.position

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        place = (worker.id, worker.num_workers) if worker else (0, 1)
        for batch in Epoch(self.rows, epoch=self.epoch, **self.options).batches(*place, position=self.position):
            yield _tensors(self.rows, batch)


class Loader:
    """Batches with workers: iterating is one epoch, len() its batches. A loop that was left early is gone on with.

    state_dict() says where in the epoch the loop is (a batch counts when it is handed out) and load_state_dict() goes
    there; with other workers, ranks, seed, batch size, pools or rows the order would be another, so it refuses."""

    def __init__(
        self,
        store: Store,
        values,
        batch_size: int,
        num_workers: int = 0,
        multiprocessing_context=None,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        **options,
    ):
        self.data = Batches(store, values, batch_size, **options)
        self.num_workers = num_workers
        self.options = dict(batch_size=None, num_workers=num_workers, pin_memory=pin_memory)
        if num_workers:
            self.options |= dict(multiprocessing_context=multiprocessing_context, prefetch_factor=prefetch_factor or 2)
        self.epoch = self.position = 0

    def __len__(self):
        return len(Epoch(self.data.rows, epoch=self.epoch, **self.data.options))

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self.data.set_epoch(self.epoch, self.position)
        for batch in DataLoader(self.data, **self.options):
            self.position += 1
            yield batch
        self.epoch, self.position = self.epoch + 1, 0

    def _identity(self) -> dict:
        rows = self.data.rows
        return {
            **{k: v for k, v in self.data.options.items() if k != "rank"},
            "num_workers": max(1, self.num_workers),
            "values": rows.names(),
            "n_rows": len(rows),
        }

    def state_dict(self) -> dict:
        return {"epoch": self.epoch, "position": self.position, **self._identity()}

    def load_state_dict(self, state: dict):
        here = self._identity()
        differ = [f"{k} is {here[k]!r}, was {state.get(k)!r}" for k in here if here[k] != state.get(k)]
        if differ and state["position"]:
            raise StoreError("the epoch cannot go on in its order: " + "; ".join(differ))
        self.epoch, self.position = state["epoch"], state["position"]


class RowDataset(Dataset):
    """Map-style: item i is row i of those that count, a dict of tensors; lists of items are read chunk by chunk.

    Chunks read stay in memory up to cache_bytes, so items near one another cost one decompression. For training in a
    shuffled order take Batches, or this with batch_sampler=dataset.sampler(...) and no workers: items of your own
    random order cost a chunk each."""

    def __init__(
        self,
        store: Store,
        values,
        where=None,
        tables: bool = False,
        normalise: str | None = None,
        cache_bytes: int = POOL_BYTES,
    ):
        self.rows = Rows(store, values, where=where, tables=tables, normalise=normalise)
        self.cache_bytes, self.cached = cache_bytes, OrderedDict()

    def __getstate__(self):
        return {**self.__dict__, "cached": OrderedDict()}

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([item])[0]

    def __getitems__(self, items: list[int]) -> list[dict[str, torch.Tensor]]:
        batch = self.batch(items)
        return [{k: x[i] for k, x in batch.items()} for i in range(len(items))]

    def batch(self, items) -> dict[str, torch.Tensor]:
        """Items as one dict of stacked tensors."""
        items = np.asarray(items, np.int64)
        if items.size and (items.min() < -len(self) or items.max() >= len(self)):
            raise IndexError(f"item {items.min() if items.min() < -len(self) else items.max()} of {len(self)}")
        items = np.where(items < 0, items + len(self), items)
        ends = np.cumsum(self.rows.chunk_count)
        chunks = np.searchsorted(ends, items, "right")
        out = self.rows.empty(len(items), "batch")
        for chunk in np.unique(chunks):
            which = np.flatnonzero(chunks == chunk)
            held = self._chunk(int(chunk))
            for name, column in held.items():
                out[name][which] = column[items[which] - (ends[chunk] - self.rows.chunk_count[chunk])]
        return _tensors(self.rows, self.rows.finish(out))

    def _chunk(self, chunk: int) -> dict[str, np.ndarray]:
        if chunk in self.cached:
            self.cached.move_to_end(chunk)
            return self.cached[chunk]
        count = int(self.rows.chunk_count[chunk])
        held = self.rows.empty(count, "chunk")
        self.rows.read_chunk(chunk, 0, count, held, 0)
        self.cached[chunk] = held
        keep = max(1, self.cache_bytes // max(1, self.rows.row_bytes * self.rows.chunk_rows))
        while len(self.cached) > keep:
            self.cached.popitem(last=False)
        return held

    def sampler(self, batch_size: int, seed: int = 0, epoch: int = 0) -> Iterator[list[int]]:
        """A batch sampler: lists of items, each item once, in an order of chunks mixed over the cache's size."""
        return _Sampler(self, batch_size, seed, epoch)


class _Sampler:
    def __init__(self, data: RowDataset, batch_size: int, seed: int, epoch: int):
        self.data, self.args = data, (batch_size, seed, epoch)

    def _epoch(self) -> Epoch:
        return Epoch(self.data.rows, *self.args, pool_bytes=max(1, self.data.cache_bytes * 3 // 4))

    def __len__(self):
        return len(self._epoch())

    def __iter__(self) -> Iterator[list[int]]:
        yield from self._epoch().items()
