#!/usr/bin/env python3
"""What `make bench-vs` runs: actdump beside what people use today, on the same checkpoints and tokens, in turn.

  bench_vs.py --program bench_model --folder WORK [--families mamba,jamba,bamba,laguna] [--dtypes float32,bfloat16]
              [--length 512] [--tokens 4096] [--rounds 3] [--threads 2]

Beside each family: transformers with forward hooks on the same three layers, rows into h5py with zstd
(baseline_transformers.py), run by the Python that ACTDUMP_BASELINE_PYTHON names, which needs torch, transformers, h5py and
hdf5plugin; and on mamba llama.cpp capturing nothing (baseline_llama.py), run by ACTDUMP_LLAMA_PYTHON (absent: the first),
which needs llama-cpp-python and gguf. What cannot be imported is left out and said so. All are started once and then run
passes in turn: ours, theirs, ours, theirs; a ratio is of a round, and the median is printed. Results go to WORK/vs.json.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from bench import FAMILIES, prepare

HERE = Path(__file__).resolve().parent


class Runner:
    """A program that runs a pass for each line it is given."""

    def __init__(self, name, line):
        self.name = name
        self.process = subprocess.Popen([str(x) for x in line], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.rates = []
        self.what = self.read().get("what", name)

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended with status {self.process.wait()}")
        return json.loads(line)

    def run(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        got = self.read()
        self.rates.append(got["tokens"] / got["seconds"])

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def median(values):
    values = sorted(values)
    n = len(values)
    return values[n // 2] if n % 2 else 0.5 * (values[n // 2 - 1] + values[n // 2])


def can_import(python, modules):
    return shutil.which(python) is not None and subprocess.run([python, "-c", f"import {modules}"],
                                                               capture_output=True).returncode == 0


def start(a, family, dtype, pythons):
    """The runners of one family and dtype; ours is the first."""
    job = prepare(a.folder, family, a.length)
    layers = json.loads(job.read_text())["captures"]["residuals"]["layers"]
    corpus = a.folder / family / f"tokens-{a.length}.npy"
    common = ["--dtype", dtype, "--tokens", a.tokens, "--threads", a.threads]
    runners = [Runner("actdump", [a.program, job, "--serve", "--batches", max(1, a.tokens // max(2048, a.length)), "--set",
                                  f"model.dtype={dtype}", "--set", f"run.threads={a.threads}"])]
    if pythons["transformers"]:
        runners.append(Runner("transformers", [pythons["transformers"], HERE / "baseline_transformers.py", a.folder / family, corpus,
                                               ",".join(map(str, layers)), a.folder / "baseline.h5", *common]))
    if pythons["llama.cpp"] and family == "mamba":
        runners.append(Runner("llama.cpp", [pythons["llama.cpp"], HERE / "baseline_llama.py", a.folder / family, corpus,
                                            a.folder / f"mamba-{dtype}.gguf", *common]))
    return runners


def measure(a, family, dtype, pythons):
    runners = start(a, family, dtype, pythons)
    for _ in range(a.rounds):
        for runner in runners:
            runner.run()
    ours = runners[0]
    results = []
    for runner in runners:
        runner.close()
    for other in runners[1:]:
        r = {"key": [family, dtype, a.length], "beside": other.name, "what": other.what, "ours_tokens_s": median(ours.rates),
             "theirs_tokens_s": median(other.rates), "ratio": median([x / y for x, y in zip(ours.rates, other.rates)]),
             "ours": ours.rates, "theirs": other.rates}
        print(f"{family:8}{dtype:10}{a.length:7}  {other.name:14}{r['ours_tokens_s']:9.0f}{r['theirs_tokens_s']:9.0f}"
              f"{r['ratio']:8.2f}", flush=True)
        results.append(r)
    return results


def find_pythons():
    first = os.environ.get("ACTDUMP_BASELINE_PYTHON", sys.executable)
    second = os.environ.get("ACTDUMP_LLAMA_PYTHON", first)
    pythons = {"transformers": first if can_import(first, "torch, transformers, h5py, hdf5plugin") else None,
               "llama.cpp": second if can_import(second, "llama_cpp, gguf") else None}
    for name, python in pythons.items():
        if python is None:
            print(f"{name} is left out: {first if name == 'transformers' else second} cannot import it "
                  f"(set {'ACTDUMP_BASELINE_PYTHON' if name == 'transformers' else 'ACTDUMP_LLAMA_PYTHON'})", flush=True)
    return pythons


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--program", type=Path, required=True)
    p.add_argument("--folder", type=Path, required=True)
    p.add_argument("--families", default=",".join(FAMILIES))
    p.add_argument("--dtypes", default="float32,bfloat16")
    p.add_argument("--length", type=int, default=512)
    p.add_argument("--tokens", type=int, default=4096)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--threads", type=int, default=2)
    a = p.parse_args()
    a.folder.mkdir(parents=True, exist_ok=True)
    pythons = find_pythons()
    if not any(pythons.values()):
        sys.exit("nothing to compare with")
    print(f"{'family':8}{'dtype':10}{'length':>7}  {'beside':14}{'ours':>9}{'theirs':>9}{'ratio':>8}", flush=True)
    results = []
    for family in a.families.split(","):
        for dtype in a.dtypes.split(","):
            results += measure(a, family, dtype, pythons)
            (a.folder / "vs.json").write_text(json.dumps(results, indent=1))
    print(f"tokens/s on {a.threads} threads, medians of {a.rounds} rounds in turn; results in {a.folder / 'vs.json'}")


if __name__ == "__main__":
    main()
