#!/usr/bin/env python3
"""How fast a store is read: in order and shuffled, against the limit and against plain h5py.

    python python/bench_reading.py STORE [CAPTURE] [--seconds 3] [--rounds 3]

The limit is reading and decompressing every chunk once into the same memory, and nothing else. Figures are of raw bytes
of the capture's values, the median of rounds that take the ways in turn, in one process (HDF5 reads with one thread; a
loader's workers are processes). Limit, order and shuffle are measured over whole passes, as many as --seconds takes,
after one that is not counted: a pool is read at once and handed out batch by batch, so part of a pass says little. On a machine that others use too, the
second column is the one to look at: the same by this process's own processor time."""

import argparse
import json
import statistics
import time

import h5py
import numpy as np

import actdump
from actdump.epoch import POOL_BYTES, Epoch, Rows


def read_chunks(rows: Rows, n_chunks=16):
    """Every chunk of every value, some at a time, into one buffer."""
    for value in rows.values:
        step = n_chunks * value.chunk_rows
        buffer = np.empty((step, *value.row_shape), value.stored_dtype)
        for i in range(len(value.store.segments)):
            n_rows = int(value.first[i + 1] - value.first[i])
            for begin in range(0, n_rows, step):
                value.read_segment(i, begin, buffer[: min(step, n_rows - begin)])
        yield len(value) * value.row_bytes


def read_in_order(rows: Rows, span=16384):
    for value in rows.values:
        for begin in range(0, len(value), span):
            yield value.read(slice(begin, begin + span), raw=True).nbytes


def read_shuffled(rows: Rows, batch_size):
    for batch in Epoch(rows, batch_size, seed=time.perf_counter_ns()).batches():
        yield sum(x.nbytes for x in batch.values())


def read_with_workers(loader):
    for batch in loader:
        yield sum(x.nbytes for x in batch.values())


def read_rows_of_h5py(path, rows: Rows, seconds, seed=0):
    """What a random batch costs when single rows are asked of store.h5."""
    rng, end = np.random.default_rng(seed), time.perf_counter() + seconds
    with h5py.File(path / "store.h5") as file:
        data = [file[v.path] for v in rows.values]
        while time.perf_counter() < end:
            i = rng.integers(len(rows))
            yield sum(d[i].size * v.stored_dtype.itemsize for d, v in zip(data, rows.values))


def read_lists_of_h5py(path, rows: Rows, seconds, seed=0):
    """The same as h5py's list of rows, in increasing order as it must be."""
    rng, end = np.random.default_rng(seed), time.perf_counter() + seconds
    with h5py.File(path / "store.h5") as file:
        data = [file[v.path] for v in rows.values]
        while time.perf_counter() < end:
            which = np.sort(rng.choice(len(rows), min(256, len(rows)), replace=False))
            yield sum(d[which].size * v.stored_dtype.itemsize for d, v in zip(data, rows.values))


def rate(make, seconds):
    """Megabytes a second, by the clock and by processor time, of passes that were begun within these seconds. `make`
    makes a pass: a generator of byte counts."""
    n_bytes, begun, used = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - begun < seconds:
        n_bytes += sum(make())
    return n_bytes / (time.perf_counter() - begun) / 1e6, n_bytes / (time.process_time() - used) / 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("capture", nargs="?", help="default: the store's first")
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=3, help="for each way and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0, help="also a torch loader with so many workers")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    store = actdump.open(options.store)
    capture = store[options.capture or next(iter(store.captures))]
    rows = Rows(store, [v for v in capture.values.values() if v.axes[0] == "row"])

    ways = {
        "limit: chunks read and decompressed": lambda: read_chunks(rows),
        "in order": lambda: read_in_order(rows),
        "shuffled batches": lambda: read_shuffled(rows, options.batch_size),
        "h5py, single rows at random": lambda: read_rows_of_h5py(store.path, rows, options.seconds),
        "h5py, lists of rows": lambda: read_lists_of_h5py(store.path, rows, options.seconds),
    }
    if options.workers:
        from actdump.training import Loader

        loader = Loader(store, rows.names(), options.batch_size, num_workers=options.workers)
        ways[f"torch loader, {options.workers} workers"] = lambda: read_with_workers(loader)
    for make in list(ways.values())[:3]:
        sum(make())
    found = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, make in ways.items():
            found[name].append(rate(make, options.seconds))
    medians = {name: tuple(map(statistics.median, zip(*x))) for name, x in found.items()}
    limit = medians["limit: chunks read and decompressed"]
    results = {name: {"MB_per_s": x[0], "of_limit": x[0] / limit[0]} for name, x in medians.items()}
    for name, result in results.items():
        if not name.startswith("torch"):  # whose workers' time is not this process's
            result |= {"MB_per_cpu_s": medians[name][1], "of_limit_cpu": medians[name][1] / limit[1]}
    if options.json:
        print(json.dumps(results, indent=1))
        return
    print(
        f"{store.path}, capture {capture.name}: {len(rows.values)} values of {len(rows):,} rows, "
        f"{rows.row_bytes:,} bytes a row, {rows.chunk_rows} rows a chunk, "
        f"pools of {POOL_BYTES >> 20} MiB, batches of {options.batch_size}"
    )
    print(f"{'':<38} {'MB/s':>9} {'of limit':>9} {'MB/cpu s':>10} {'of limit':>9}")
    for name, x in results.items():
        cpu = f"{x['MB_per_cpu_s']:10.1f} {100 * x['of_limit_cpu']:7.1f} %" if "of_limit_cpu" in x else ""
        print(f"{name:<38} {x['MB_per_s']:9.1f} {100 * x['of_limit']:7.1f} % {cpu}")


if __name__ == "__main__":
    main()
