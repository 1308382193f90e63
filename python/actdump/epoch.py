"""The order of an epoch: every row once, from whole chunks, mixed over many of them.

The chunks of all segments are put in an order that the seed gives, and laid end to end; that line of rows is cut into
equal parts for the ranks, and each rank's into batches. A rank's batches are cut into as many runs as there are
workers, and each run into pools of about `pool_bytes`. A pool's rows are read chunk by chunk, in the order of the
files, shuffled all together, and handed out as batches. So rows that lie side by side in a batch come from chunks that
lie anywhere in the store, single rows are never read, and any place in an epoch can be gone to by reading one pool.

How well rows are mixed is a matter of how many chunks a pool holds: two neighbours come from the same chunk with
probability 1 / (chunks a pool), and where the pool holds the whole store the order is a uniform permutation.

NumPy alone; actdump.training has the torch datasets. One process uses one Epoch (h5py is not parallel inside one)."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Iterator, Sequence

import numpy as np

from actdump.errors import StoreError
from actdump.store import ROW_TABLES, TABLES, Capture, Store, Value, to_tensor, widen, _joined, _row_numbers

POOL_BYTES = 256 << 20
READ_CHUNKS = 16  # neighbours read in one call, about
KEPT = 3  # blocks of memory kept for a name: what a loop holds, what comes next, and one more
NORMALISATIONS = (None, "mean", "norm")


@dataclass(frozen=True)
class Normalisation:
    """x -> (x - mean) * scale in float32, from the statistics of all rows of a value."""

    mean: np.ndarray | None
    scale: float

    @staticmethod
    def of(value: Value, kind: str | None) -> "Normalisation | None":
        """kind "mean": the mean row is taken away. "norm": rows are scaled to a mean norm of sqrt(elements a row)."""
        if kind not in NORMALISATIONS:
            raise ValueError(f"normalisation {kind!r}: one of {NORMALISATIONS}")
        if kind is None:
            return None
        moments = value.moments()
        if kind == "mean":
            if not np.isfinite(moments["mean"]).all():
                raise StoreError(f"{value.path}: a column has no finite element, so no mean to take away")
            return Normalisation(moments["mean"].astype(np.float32), 1.0)
        if not (np.isfinite(moments["mean_norm"]) and moments["mean_norm"] > 0):
            raise StoreError(f"{value.path}: its mean norm is {moments['mean_norm']}, nothing to scale by")
        return Normalisation(None, float(np.sqrt(value._width) / moments["mean_norm"]))

    def apply(self, rows: np.ndarray) -> np.ndarray:
        """Of float32 rows, in place."""
        if self.mean is not None:
            rows -= self.mean
        if self.scale != 1.0:
            rows *= np.float32(self.scale)
        return rows

    def undo(self, rows):
        """Back to the store's scale: of arrays or tensors."""
        rows = rows / self.scale
        if self.mean is None:
            return rows
        return rows + (self.mean if isinstance(rows, np.ndarray) else to_tensor(self.mean, "float32").to(rows.device))


class Lender:
    """Arrays whose memory is used again once the last array or tensor over it is gone.

    Fresh memory comes from the system page by page, and that takes longer than copying a batch into it."""

    def __init__(self):
        self.free: dict[str, list[np.ndarray]] = {}

    def __reduce__(self):
        return Lender, ()  # what is pickled takes no memory along

    def lend(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        n_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if not n_bytes:
            return np.empty(shape, dtype)
        free = self.free.setdefault(name, [])
        fits = [i for i, block in enumerate(free) if len(block) >= n_bytes]
        block = free.pop(fits[0]) if fits else np.empty(n_bytes, np.uint8)
        # Views hold on to the array that they end in, which a memoryview makes this one.
        flat = np.frombuffer(memoryview(block), np.uint8, n_bytes)
        weakref.finalize(flat, _take_back, free, block).atexit = False
        return flat.view(dtype).reshape(shape)


def _take_back(free: list[np.ndarray], block: np.ndarray):
    free.append(block)
    del free[:-KEPT]


class Rows:
    """Rows of several values of one capture side by side, and which of them count.

    values: one or more values that have the same rows (of one capture, all by row or all by sequence). where: numbers
    or a mask of the rows to use (Capture.select gives them); None is all. tables: add each row's "row" number,
    "input_ids", "position", "sequence" and "document" to the items (for values by sequence only "row")."""

    def __init__(
        self,
        store: Store,
        values: str | Value | Sequence[str | Value],
        where=None,
        tables: bool = False,
        normalise: str | None = None,
    ):
        values = [values] if isinstance(values, (str, Value)) else list(values)
        self.store = store
        self.values: list[Value] = [v if isinstance(v, Value) else store[v] for v in values]
        if not self.values or any(isinstance(v, Capture) for v in self.values):
            raise StoreError(f"name values of {store.path}, not captures: it has {', '.join(list(store.values)[:8])}")
        one = self.values[0]
        for other in self.values[1:]:
            if (other.capture.name, other.axes[0]) != (one.capture.name, one.axes[0]):
                raise StoreError(
                    f"{one.path} [{one.layout}] and {other.path} [{other.layout}] do not have the same "
                    f"rows: values side by side are of one capture, and all by row or all by sequence"
                )
        self.first, self.capture, self.tables = one.first, one.capture, tables
        self.by_row = one.axes[0] == "row"
        self.normalisation = [Normalisation.of(v, normalise if v.is_float else None) for v in self.values]
        self.selected = None if where is None else np.unique(_row_numbers(where, len(one)))
        self.chunk_rows = max(v.chunk_rows for v in self.values)
        self.row_bytes = sum(v.row_bytes for v in self.values) + (32 if tables else 0)
        self.lender = Lender()
        self._cut_chunks()

    def _cut_chunks(self):
        """Chunks of all segments: chunk_segment, chunk_begin (row of the segment), and chunk_count rows that count."""
        segment, begin, count = [], [], []
        for i, (a, b) in enumerate(zip(self.first[:-1], self.first[1:])):
            starts = np.arange(a, b, self.chunk_rows)
            ends = np.minimum(starts + self.chunk_rows, b)
            if self.selected is not None:
                n = np.searchsorted(self.selected, ends) - np.searchsorted(self.selected, starts)
            else:
                n = ends - starts
            keep = n > 0
            segment.append(np.full(keep.sum(), i))
            begin.append(starts[keep] - a)
            count.append(n[keep])
        self.chunk_segment, self.chunk_begin, self.chunk_count = _joined(segment), _joined(begin), _joined(count)

    def __len__(self):
        return int(self.chunk_count.sum())

    def row_of(self, item: int | np.ndarray):
        """The row number of item i of those that count."""
        return item if self.selected is None else self.selected[item]

    def names(self) -> list[str]:
        return [v.path for v in self.values]

    def read_rows(self, numbers) -> dict[str, np.ndarray]:
        """Finished arrays of these row numbers, in their order."""
        numbers = _row_numbers(numbers, int(self.first[-1]))
        raw = {v.path: v.read(numbers, raw=True) for v in self.values}
        if self.tables:
            raw["row"] = numbers
            if self.by_row:
                raw |= self.capture.rows(numbers)
        return self.finish(raw)

    def finish(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Normalised where that was asked; the rest as stored, bfloat16 as bits."""
        for value, norm in zip(self.values, self.normalisation):
            if norm is not None:
                rows = batch[value.path]
                wide = self.lender.lend(f"{value.path} normalised", rows.shape, np.dtype(np.float32))
                if value.dtype == "bfloat16":
                    widen(rows, wide)
                else:
                    wide[...] = rows
                batch[value.path] = norm.apply(wide)
        return batch

    def empty(self, n: int, use: str) -> dict[str, np.ndarray]:
        """Arrays for n rows, in memory that was lent for the same use before."""
        kinds = {v.path: (v.row_shape, v.stored_dtype) for v in self.values}
        if self.tables:
            kinds["row"] = (), np.dtype(np.int64)
            if self.by_row:
                kinds |= {k: ((), np.dtype(TABLES[k])) for k in ROW_TABLES}
        return {k: self.lender.lend(f"{k} {use}", (n, *shape), dtype) for k, (shape, dtype) in kinds.items()}

    def gather(self, pool: dict[str, np.ndarray], which: np.ndarray) -> dict[str, np.ndarray]:
        """A finished batch of these rows of a pool."""
        batch = self.empty(len(which), "batch")
        for name, rows in pool.items():
            np.take(rows, which, axis=0, out=batch[name], mode="clip")  # "raise" would go through a buffer
        return self.finish(batch)

    def read_chunks(self, pieces: list[tuple[int, int, int]], out: dict[str, np.ndarray]):
        """Rows [begin, end) of those that count in each chunk, one piece after the other; whole neighbours at once."""
        at = 0
        for chunk, begin, end in self._joined_pieces(pieces):
            self.read_chunk(chunk, begin, end, out, at)
            at += end - begin

    def _joined_pieces(self, pieces: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
        """Neighbours in a segment as one piece, which then reaches past its chunk; some READ_CHUNKS at most."""
        held = None
        for chunk, begin, end in pieces:
            if held and self.selected is None and begin == 0:
                start = int(self.chunk_begin[held[0]])
                same = self.chunk_segment[chunk] == self.chunk_segment[held[0]]
                if same and start + held[2] == self.chunk_begin[chunk] and held[2] < READ_CHUNKS * self.chunk_rows:
                    held = held[0], held[1], held[2] + end
                    continue
            if held:
                yield held
            held = chunk, begin, end
        if held:
            yield held

    def read_chunk(self, chunk: int, begin: int, end: int, out: dict[str, np.ndarray], at: int):
        """Rows [begin, end) of those that count, from a chunk's first on, into out from row `at` on."""
        segment, start = int(self.chunk_segment[chunk]), int(self.chunk_begin[chunk])
        first = int(self.first[segment])
        if self.selected is None:
            a, b, pick = start + begin, start + end, None
        else:
            from_ = int(np.searchsorted(self.selected, first + start)) + begin
            rows = self.selected[from_ : from_ + end - begin] - first
            a, b = int(rows[0]), int(rows[-1]) + 1
            pick = None if b - a == len(rows) else rows - a
        place = slice(at, at + end - begin)
        for value in self.values:
            if pick is None:
                value.read_segment(segment, a, out[value.path][place])
            else:
                part = np.empty((b - a, *value.row_shape), value.stored_dtype)
                value.read_segment(segment, a, part)
                out[value.path][place] = part[pick]
        if self.tables:
            rows = np.arange(a, b)
            out["row"][place] = first + (rows if pick is None else rows[pick])
            if self.by_row:
                for name, column in self.capture.segment_rows(segment, a, b).items():
                    out[name][place] = column if pick is None else column[pick]


class Epoch:
    """One epoch over `rows` as one rank sees it.

    len(epoch) is the rank's number of batches, the same on every rank: the ranks' numbers of rows differ by one at
    most, and where one row would make a batch of its own on some ranks only, the others split theirs (a rank without a
    row to split, which takes batches of 1 or fewer rows than ranks, has an empty batch). shuffle=False gives the
    store's order, to each worker a run of it."""

    def __init__(
        self,
        rows: Rows,
        batch_size: int,
        seed: int = 0,
        epoch: int = 0,
        rank: int = 0,
        n_ranks: int = 1,
        pool_bytes: int = POOL_BYTES,
        shuffle: bool = True,
    ):
        if batch_size < 1 or not 0 <= rank < n_ranks:
            raise ValueError(f"batch_size {batch_size}, rank {rank} of {n_ranks}")
        self.rows, self.batch_size, self.shuffle, self.seed, self.epoch = rows, batch_size, shuffle, seed, epoch
        n_chunks = len(rows.chunk_count)
        self.order = np.random.default_rng([seed, epoch]).permutation(n_chunks) if shuffle else np.arange(n_chunks)
        self.chunk_end = np.cumsum(rows.chunk_count[self.order])  # on the line of rows
        n = len(rows)
        self.begin, end = n * rank // n_ranks, n * (rank + 1) // n_ranks
        self.bounds = self.begin + _batch_bounds(end - self.begin, batch_size, -(-(-(-n // n_ranks)) // batch_size))
        self.pool_batches = max(1, pool_bytes // max(1, rows.row_bytes * batch_size))  # at most

    def __len__(self):
        return len(self.bounds) - 1

    def batches(self, worker: int = 0, n_workers: int = 1, position: int = 0) -> Iterator[dict[str, np.ndarray]]:
        """The batches of one worker, when `position` batches of the epoch have been handed out over all workers.

        Batch i of an epoch is the next one of worker i % n_workers."""
        here = (worker + position) % n_workers  # so that the next batch is that of worker 0 after a resume too
        done = (position - here + n_workers - 1) // n_workers
        share, extra = divmod(len(self), n_workers)
        first = here * share + min(here, extra)
        last = first + share + (here < extra)
        for start, stop in self._pools(first, last):
            if stop - first > done:
                yield from self._pool(start, stop, max(0, first + done - start))

    def _pools(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Batches [first, last) cut into the fewest pools, all of about one size: a small rest would be mixed badly."""
        n_pools = -(-(last - first) // self.pool_batches)
        cuts = [first + (last - first) * i // n_pools for i in range(n_pools + 1)] if n_pools else []
        yield from zip(cuts[:-1], cuts[1:])

    def _pool(self, start: int, stop: int, skip: int) -> Iterator[dict[str, np.ndarray]]:
        begin, end = int(self.bounds[start]), int(self.bounds[stop])
        pool = self.rows.empty(end - begin, "pool")
        self.rows.read_chunks(self._pieces(begin, end), pool)
        order = self._mixed(begin, end)
        for i in range(start + skip, stop):
            which = order[self.bounds[i] - begin : self.bounds[i + 1] - begin]
            yield self.rows.gather(pool, which)

    def items(self) -> Iterator[list[int]]:
        """Of one worker: the batches as numbers of items (rows that count), without reading any."""
        item_begin = np.cumsum(self.rows.chunk_count) - self.rows.chunk_count
        for start, stop in self._pools(0, len(self)):
            bounds = self.bounds[start : stop + 1]
            pieces = self._pieces(int(bounds[0]), int(bounds[-1]))
            pool = _joined([item_begin[chunk] + np.arange(a, b) for chunk, a, b in pieces])
            order = self._mixed(int(bounds[0]), int(bounds[-1]))
            yield from (pool[order[a:b]].tolist() for a, b in zip(bounds[:-1] - bounds[0], bounds[1:] - bounds[0]))

    def _mixed(self, begin: int, end: int) -> np.ndarray:
        """The order of the rows of the pool over rows [begin, end) of the line."""
        if not self.shuffle:
            return np.arange(end - begin)
        return np.random.default_rng([self.seed, self.epoch, begin]).permutation(end - begin)

    def _pieces(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """(chunk, rows [a, b) of it) of the line's rows [begin, end), in the files' order: they are mixed anyway."""
        if begin == end:
            return []
        i, j = (int(np.searchsorted(self.chunk_end, x, "right")) for x in (begin, end - 1))
        pieces = []
        for k in range(i, j + 1):
            chunk, chunk_begin = int(self.order[k]), int(self.chunk_end[k - 1]) if k else 0
            a, b = max(begin, chunk_begin) - chunk_begin, min(end, int(self.chunk_end[k])) - chunk_begin
            pieces.append((chunk, a, b))
        return sorted(pieces)


def _batch_bounds(n: int, batch_size: int, n_batches: int) -> np.ndarray:
    """Where n rows are cut into n_batches batches of batch_size, of which only the last may be smaller.

    n_batches may be one more than n rows need (another rank has a row more): then the last row is a batch too."""
    bounds = np.minimum(np.arange(n_batches + 1, dtype=np.int64) * batch_size, n)
    if n_batches > 1 and bounds[-2] == n and batch_size > 1:
        bounds[-2] -= 1
    return bounds
