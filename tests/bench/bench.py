#!/usr/bin/env python3
"""What `make bench` runs on a CPU. Parts, of which --parts chooses:

  models      for each family, dtype and length, three layers of layer_output captured: tokens/s of the matrix products alone
              at the same shapes (the bound), of the forward that captures nothing, of the one that captures, and with a store
              written; the share of the bound, what capturing and writing cost, peak memory (bench_model)
  everything  every value but states, decays and scores captured: tokens/s beside what computing alone and writing alone
              reach, as a share of the slower of them, and of both one after the other on the same processors
  ranks       two ranks of one thread against one rank of two threads, by actdump under mpirun
  start       seconds to the first batch against reading and packing the weights alone, peak memory against what stays
  handout     64 ranks and units of no work: what handing out a unit costs (bench_ranks)

  bench.py --build BUILD --folder WORK [--parts ...] [--families mamba,jamba,bamba,laguna] [--dtypes float32,bfloat16]
           [--lengths 512,2048,8192,32768] [--rounds 3] [--batches 2] [--threads 2] [--start-model mamba370m]
           [--against RESULTS.json]

Threads wait as configs/nightly.sbatch has them wait, unless GOMP_SPINCOUNT or OMP_WAIT_POLICY says otherwise.

Absent: all parts, float32 (and bfloat16 where the processor multiplies it), 512 tokens: some ten minutes on two cores.
Machines are noisy: rounds are interleaved, ratios are of a round, medians are printed. Results go to WORK/results.json;
--against prints the ratio to another such file, made from another commit on the same machine.
"""
import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LAYERS = {"mamba": 24, "jamba": 8, "bamba": 12, "laguna": 8, "mamba370m": 48, "mamba1b4": 48}
FAMILIES = ["mamba", "jamba", "bamba", "laguna"]
PARTS = ["models", "everything", "ranks", "start", "handout"]
LEFT_OUT = {"states", "state", "state_input", "state_output", "decays", "attention_scores", "attention_probabilities"}
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
       "OMPI_MCA_btl_vader_single_copy_mechanism": "none", "PMIX_MCA_gds": "hash"}


def median(values):
    values = sorted(values)
    n = len(values)
    return values[n // 2] if n % 2 else 0.5 * (values[n // 2 - 1] + values[n // 2])


def prepare(folder, family, length, name="", **job):
    """Makes the checkpoint and the corpus where they are missing; returns the path of the job file."""
    checkpoint = folder / family
    subprocess.run([sys.executable, HERE / "make_checkpoint.py", family, checkpoint, "--length", str(length),
                    "--sequences", str(max(4, 32768 // length))], check=True, stdout=subprocess.DEVNULL)
    n = LAYERS[family]
    whole = {"model": {"checkpoint": str(checkpoint), "device": "cpu"},
             "corpus": {"format": "npy", "path": str(checkpoint / f"tokens-{length}.npy"), "context": length},
             "captures": {"residuals": {"values": ["layer_output"], "layers": [n // 4, n // 2, n - 1]}},
             "store": {"path": str(folder / f"store-{family}{name}")}} | job
    path = folder / f"{family}{name}-{length}.json"
    path.write_text(json.dumps(whole))
    return path


def run_json(*line, sets=(), env=None):
    line = [str(x) for x in line] + [x for s in sets for x in ("--set", s)]
    done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, **(env or {})})
    if done.returncode != 0:
        sys.exit(f"{' '.join(line)}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout[done.stdout.index("{"):])


def multiplies_bfloat16():
    try:
        return "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


class Results:
    def __init__(self, path, against):
        self.path, self.list = path, []
        self.before = {tuple(r["key"]): r for r in json.loads(against.read_text())} if against else {}

    def add(self, key, figure, result):
        """Keeps a result and returns what is to be printed behind it: its main figure over the one before."""
        self.list.append({"key": key, "figure": figure, **result})
        self.path.write_text(json.dumps(self.list, indent=1))
        before = self.before.get(tuple(key))
        return f"   {result[figure] / before[figure]:.2f} x before" if before and before.get(figure) else ""


# ---------------------------------------------------------------- parts

def bench_models(a, results):
    print(f"{'family':8}{'dtype':10}{'length':>7}{'products':>10}{'bare':>8}{'forward':>9}{'store':>8}{'share':>7}{'capture':>9}"
          f"{'writing':>9}{'GFLOP/s':>9}{'peak MB':>9}", flush=True)
    for family in a.families:
        for dtype in a.dtypes:
            for length in a.lengths:
                # a sequence of that length is a batch of its own, and long enough to need no rounds
                how = ["--quick", "--batches", 1] if length > 4096 else ["--rounds", a.rounds, "--batches", a.batches]
                r = run_json(a.bench / "bench_model", prepare(a.folder, family, length), "--ops", *how, sets=[f"model.dtype={dtype}", f"run.threads={a.threads}"])
                behind = results.add(["models", family, dtype, length], "store_tokens_s", r)
                bare, capture, writing = (f"{r[name]:{form}}" if name in r else "-" for name, form in (
                    ("bare_tokens_s", ".0f"), ("cost_of_capture", ".1%"), ("cost_of_writing", ".1%")))
                spread = ""
                if a.rounds >= 5 and "share_quartiles" in r:
                    (low, high), (least, most) = r["share_quartiles"], r["capture_quartiles"]
                    spread = f"   share {low:.2f} to {high:.2f}, capture {least:.1%} to {most:.1%}"
                print(f"{family:8}{dtype:10}{length:7}{r['gemm_tokens_s']:10.0f}{bare:>8}{r['forward_tokens_s']:9.0f}"
                      f"{r['store_tokens_s']:8.0f}{r['share_of_gemm_bound']:7.2f}{capture:>9}{writing:>9}{r['gemm_gflops']:9.0f}"
                      f"{r['peak_mb']:9.0f}{behind}{spread}", flush=True)
    print(f"tokens/s on {a.threads} threads; products: the matrix products alone; share: store over products; capture: over "
          "bare; writing: over forward, a unit of the store while the one before it is committed; medians, and behind them "
          "quartiles over the rounds where those are five or more\n", flush=True)


def list_values(a, family):
    """The paths of all that the family has at some layer, but LEFT_OUT."""
    shown = subprocess.run([a.actdump, "values", a.folder / family], capture_output=True, text=True, check=True).stdout
    table = shown.split("not to be had")[0].split("  layers ")[1].splitlines()[1:]
    values = {line[15:].split()[0] for line in table if line.strip()}
    return sorted(v for v in values if v.split("/")[-1] not in LEFT_OUT)


def bench_everything(a, results):
    print(f"{'family':8}{'dtype':10}{'kB/token':>9}{'forward':>9}{'writer':>8}{'store':>8}{'of slower':>11}{'of both':>9}", flush=True)
    for family in a.families:
        for dtype in a.dtypes:
            prepare(a.folder, family, 512)
            job = prepare(a.folder, family, 512, "-everything",
                          captures={"everything": {"values": list_values(a, family), "layers": "all"}})
            r = run_json(a.bench / "bench_model", job, "--writer", "--rounds", a.rounds, "--batches", 1,
                         sets=[f"model.dtype={dtype}", f"run.threads={a.threads}", "run.batch_tokens=1024"])
            behind = results.add(["everything", family, dtype, 512], "store_tokens_s", r)
            print(f"{family:8}{dtype:10}{r['bytes_a_token'] / 1e3:9.0f}{r['forward_tokens_s']:9.0f}"
                  f"{r['writer_all_threads_tokens_s']:8.0f}{r['store_tokens_s']:8.0f}{r['share_of_slower']:11.2f}"
                  f"{r['share_of_both']:9.2f}{behind}", flush=True)
    print("tokens/s; writer: the same rows compressed and written by all threads; of slower: store over the slower of forward "
          "and writer; of both: over one after the other, on the same processors\n", flush=True)


def time_ranks(a, job, n_ranks, n_threads):
    """tokens/s without what a start takes: two runs, of which one has 6 units more."""
    took = {}
    for units in (2, 8):
        store = a.folder / f"store-ranks-{n_ranks}"
        subprocess.run(["rm", "-rf", store], check=True)
        line = [a.actdump, "run", job, "--set", f"run.threads={n_threads}", "--set", f"store.path={store}", "--set",
                "store.unit_tokens=2048", "--set", f"corpus.limit={units * 4}"]
        launch = ["mpirun", "-n", str(n_ranks), "--map-by", f"slot:PE={n_threads}"] if n_ranks > 1 else []
        subprocess.run(launch + [str(x) for x in line], check=True, capture_output=True, env={**os.environ, **MPI})
        summary = json.loads((store / "store.json").read_text())["summary"]
        took[summary["tokens_this_run"]] = summary["seconds"]
    (few, short), (many, long) = sorted(took.items())
    return (many - few) / (long - short)


def bench_ranks(a, results):
    print(f"{'family':8}{'dtype':10}{f'1 x {a.threads}':>9}{f'{a.threads} x 1':>9}{'ratio':>8}", flush=True)
    for family in a.families:
        for dtype in a.dtypes[:1]:
            job = prepare(a.folder, family, 512, "-ranks", model={"checkpoint": str(a.folder / family), "dtype": dtype,
                                                                  "device": "cpu"})
            pairs = [(time_ranks(a, job, 1, a.threads), time_ranks(a, job, a.threads, 1)) for _ in range(a.rounds)]
            r = {"one_rank_tokens_s": median([x for x, _ in pairs]), "ranks_tokens_s": median([y for _, y in pairs]),
                 "ratio": median([y / x for x, y in pairs])}
            behind = results.add(["ranks", family, dtype, 512], "ratio", r)
            print(f"{family:8}{dtype:10}{r['one_rank_tokens_s']:9.0f}{r['ranks_tokens_s']:9.0f}{r['ratio']:8.2f}{behind}", flush=True)
    print("tokens/s with the store written: one rank of so many threads, and so many ranks of one\n", flush=True)


def bench_start(a, results):
    job = prepare(a.folder, a.start_model, 512)
    sets = [f"run.threads={a.threads}"]
    rounds = []
    run_json(a.bench / "bench_start", job, "--alone", sets=sets)
    for _ in range(a.rounds):
        alone, whole = (run_json(a.bench / "bench_start", job, *flag, sets=sets) for flag in (["--alone"], []))
        rounds.append({**whole, **alone, "opened_ratio": whole["opened_s"] / alone["alone_s"],
                       "first_ratio": (whole["first_batch_s"] - whole["later_batch_s"]) / alone["alone_s"],
                       "memory_ratio": whole["peak_mb"] / whole["resident_mb"], "peak_mb": whole["peak_mb"],
                       "resident_mb": whole["resident_mb"]})
    r = {name: median([x[name] for x in rounds]) for name in rounds[0]}
    behind = results.add(["start", a.start_model, "own", 512], "first_ratio", r)
    print(f"{a.start_model}, {r['checkpoint_mb']:.0f} MB read: reading and packing alone {r['alone_s']:.2f} s; open after "
          f"{r['opened_s']:.2f} s ({r['opened_ratio']:.2f}); first batch done after {r['first_batch_s']:.2f} s, without what a later "
          f"one takes {r['first_ratio']:.2f}; peak {r['peak_mb']:.0f} MB over resident {r['resident_mb']:.0f} MB: "
          f"{r['memory_ratio']:.2f}{behind}\n", flush=True)


def bench_handout(a, results):
    for name, options in (("no work", ["--units", 20000, "--only-others", "--ahead"]),
                          ("half a second", ["--units", 1260, "--work", 0.5, "--batches", 8, "--ahead", "--only-others"])):
        r = run_json("mpirun", "--oversubscribe", "-n", 64, a.bench / "bench_ranks", *options,
                     env={**MPI, "OMPI_MCA_mpi_yield_when_idle": "1"})
        behind = results.add(["handout", name, "64 ranks", 0], "units_s", r)
        print(f"64 ranks, units of {name}: {r['units_s']:.0f} units/s, {r['rank_0_processor_us']:.1f} us of rank 0's processor and "
              f"{r['waited_us']:.0f} us of waiting a unit{behind}", flush=True)


def comma_list(text):
    return text.split(",")


def main():
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # as configs/nightly.sbatch has it
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build", type=Path, required=True)
    p.add_argument("--folder", type=Path, required=True)
    p.add_argument("--parts", type=comma_list, default=PARTS)
    p.add_argument("--families", type=comma_list, default=FAMILIES)
    p.add_argument("--dtypes", type=comma_list, default=["float32"] + (["bfloat16"] if multiplies_bfloat16() else []))
    p.add_argument("--lengths", type=lambda text: list(map(int, text.split(","))), default=[512])
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--batches", type=int, default=2)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--start-model", default="mamba370m")
    p.add_argument("--against", type=Path)
    a = p.parse_args()
    a.folder.mkdir(parents=True, exist_ok=True)
    a.bench, a.actdump = a.build / "tests/bench", a.build / "pipeline/actdump"
    results = Results(a.folder / "results.json", a.against)
    run = {"models": bench_models, "everything": bench_everything, "ranks": bench_ranks, "start": bench_start,
           "handout": bench_handout}
    for part in a.parts:
        run[part](a, results)
    print(f"results in {results.path}")


if __name__ == "__main__":
    main()
