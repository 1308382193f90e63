"""Compares a store with a fixture case: what transformers computed for each sequence run alone.

Two measures. Against a float32 run of the same weights and dtype, every number must agree to 1e-4, absolute plus
relative. A bfloat16 run is judged by its error against the float32 run: in root mean square at most one and a half times
that of transformers' own bfloat16 run. Rounding may send a token to another expert than float32 does; such a token, ours
or transformers', is left out from that layer on, and we may have a few more of them than transformers.

As a program: golden.py STORE CASE compares the store of a whole case in the case's own dtype."""
import sys
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np

import harness

TOLERANCE = 1e-4
ERROR_RATIO = 1.5
ERROR_FLOOR = 1e-6

# [head seq ...] in the golden file, [seq head ...] in a store.
HEADS_FIRST = {"attention_queries", "attention_keys", "attention_values", "attention_scores", "attention_probabilities"}
# What a store holds where a key lies past the sequence.
KEY_FILL = {"attention_scores": -np.inf, "attention_probabilities": 0.0}
MODEL_EXTRAS = ("input_ids", "attention_mask", "input_size")


class Golden:
    """The values of a golden file, in a store's layout: for a sequence [position ...], or [...] once a sequence."""

    def __init__(self, path):
        self.file = h5py.File(path)
        self.sequences = self.file["sequences"]

    def close(self):
        self.file.close()

    def paths(self):
        """All values that a store of the whole case has, those that the golden file only implies included."""
        paths = set(MODEL_EXTRAS)
        self.sequences["0"].visititems(
            lambda path, item: paths.add(path) if isinstance(item, h5py.Dataset) else None)
        for path in [p for p in paths if p.endswith("linear_attn/states")]:
            host = path.removesuffix("states")
            paths |= {host + "state", host + "state_input"}
        return paths

    def value(self, document, path):
        group = self.sequences[str(document)]
        host, _, name = path.rpartition("/")
        ids = group["input_ids"][...]
        if path == "input_ids":
            return ids
        if path == "attention_mask":
            return np.ones_like(ids)
        if path == "input_size":
            return np.array([1, len(ids)])
        if name == "state":
            return group[f"{host}/states"][...]
        if name == "state_input":  # a sequence's first window enters with no state
            return np.zeros(group[f"{host}/state_output"].shape, np.float32)
        data = group[path][...]
        return data.swapaxes(0, 1) if host.endswith("self_attn") and name in HEADS_FIRST else data

    def rows(self, path, places, n_keys=None):
        """The value at each (document, position), stacked; a position of None takes a value that a sequence has once."""
        name, cache = path.rpartition("/")[2], {}
        for document in {d for d, _ in places}:
            value = self.value(document, path)
            if name in KEY_FILL:
                value = widen(value, n_keys, KEY_FILL[name])
            cache[document] = value
        return np.stack([cache[d] if p is None else cache[d][p] for d, p in places])


def widen(value, n_keys, fill):
    wide = np.full((*value.shape[:-1], n_keys), fill, value.dtype)
    wide[..., :value.shape[-1]] = value
    return wide


@dataclass
class Report:
    agree: int = 0
    faults: list = field(default_factory=list)
    paths: set = field(default_factory=set)


def root_mean_square(a):
    return float(np.sqrt(np.mean(np.square(a, dtype=np.float64)))) if a.size else 0.0


def complaint(name, got, want, exact):
    """None where the stored numbers pass, else what is wrong. exact: the float32 run, where rounding is measured."""
    got = got.astype(np.float64)
    if name == "attention_scores":
        shown = np.isfinite(want)
        if (got[~shown] > -1e30).any():
            return "a score that the mask hides is not masked"
        got, want = got[shown], want[shown]
        exact = None if exact is None else exact[shown]
    if not np.isfinite(got).all():
        return f"{np.count_nonzero(~np.isfinite(got))} numbers are not finite"
    if exact is None:
        off = np.abs(got - want)
        return f"off by {off.max():.3g}" if (off > TOLERANCE * (1 + np.abs(want))).any() else None
    ours, theirs = root_mean_square(got - exact), root_mean_square(want - exact)
    return None if ours <= ERROR_RATIO * theirs + ERROR_FLOOR else f"rms error {ours:.3g}, transformers' {theirs:.3g}"


class Capture:
    """A capture's group, with the corpus place of each of its rows and of each sequence."""

    def __init__(self, file, name):
        self.group = file[name]
        document, start = file["sequences/document"][...], file["sequences/start"][...]
        sequence, position = self.group["rows/sequence"][...], self.group["rows/position"][...]
        self.row_sequence = sequence
        self.places = [(int(document[s]), int(start[s] + p)) for s, p in zip(sequence, position)]
        self.documents = [(int(d), None) for d in document]

    def places_of(self, path):
        """The golden places of a dataset's first axis, and whether it counts sequences."""
        once = self.group[path].attrs["layout"].split()[0] == "sequence"
        return (self.documents if once else self.places), once


class Routing:
    """Which rows leave the comparison because an expert choice differs from the float32 run's, layer by layer."""

    def __init__(self, capture, golden, exact):
        self.away, self.counts = {}, {}
        gone = np.zeros(len(capture.places), bool)
        for layer in sorted(map(int, capture.group.get("layers", {}))):
            path = f"layers/{layer}/mlp/expert_indices"
            if path in capture.group:
                right = exact.rows(path, capture.places)
                ours = (capture.group[path][...] != right).any(-1)
                theirs = (golden.rows(path, capture.places) != right).any(-1)
                self.counts[path] = (int(ours.sum()), int(theirs.sum()))
                gone = gone | ours | theirs
            self.away[layer] = gone
        self.at_end = gone

    def of(self, path):
        return self.away[int(path.split("/")[1])] if path.startswith("layers/") else self.at_end

    def complaint(self, path, n_rows):
        ours, theirs = self.counts[path]
        allowed = theirs + max(2, n_rows // 20)
        return None if ours <= allowed else f"{ours} tokens go to other experts, transformers has {theirs}"


def compare_dataset(capture, path, golden, exact, routing):
    data = capture.group[path]
    places, once = capture.places_of(path)
    name = path.rpartition("/")[2]
    try:
        want = golden.rows(path, places, data.shape[-1])
        right = exact.rows(path, places, data.shape[-1]) if exact else None
    except KeyError:
        return "the golden file has no such value"
    got = data[...]
    if got.shape != want.shape:
        return f"shape {got.shape}, expected {want.shape}"
    if exact and name == "expert_indices":
        return routing.complaint(path, len(got))
    if exact:
        away = routing.of(path)
        if once:
            away = np.isin(np.arange(len(got)), capture.row_sequence[away])
        got, want, right = got[~away], want[~away], right[~away]
    return complaint(name, got, want, right)


def compare_store(store, case, load="own", captures=None, complete=True):
    """Compares every dataset of the captures (default: all). load: "own", or "float32" for a float32 load of a bfloat16
    case. complete: every value of the case must be there."""
    case = Path(case)
    float32 = case / "golden_float32.h5"
    golden = Golden(float32 if load == "float32" and float32.exists() else case / "golden.h5")
    exact = Golden(float32) if load == "own" and float32.exists() else None
    report = Report()
    with harness.open_store(store) as file:
        names = captures or [n for n in file if isinstance(file[n], h5py.Group) and "rows" in file[n]]
        for name in names:
            capture = Capture(file, name)
            ids = capture.group["rows/input_ids"][...].astype(np.int64)
            if not np.array_equal(ids, golden.rows("input_ids", capture.places)):
                report.faults.append(f"{name}/rows/input_ids: not the corpus's tokens")
            paths = harness.value_paths(capture.group)
            missing = sorted(golden.paths() - set(paths)) if complete else []
            report.faults += [f"{name}/{path}: missing" for path in missing]
            routing = Routing(capture, golden, exact) if exact else None
            for path in paths:
                wrong = compare_dataset(capture, path, golden, exact, routing)
                if wrong:
                    report.faults.append(f"{name}/{path}: {wrong}")
                else:
                    report.agree += 1
                report.paths.add(path)
    golden.close()
    if exact:
        exact.close()
    return report


if __name__ == "__main__":
    result = compare_store(sys.argv[1], sys.argv[2])
    print(*result.faults, f"{result.agree} values agree, {len(result.faults)} differ", sep="\n")
    sys.exit(1 if result.faults or not result.agree else 0)
