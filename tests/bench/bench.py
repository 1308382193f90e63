#!/usr/bin/env python3
"""What `make bench` runs: each family at about 130 to 200 million parameters, three layers of layer_output captured.

  bench.py --program bench_model --folder WORK [--families mamba,jamba,bamba,laguna] [--dtypes float32,bfloat16]
           [--lengths 512] [--rounds 3] [--batches 2] [--threads 2] [--against RESULTS.json]

For each: tokens/s of the matrix products alone at the same shapes (the bound), of the forward, and of the forward with a
store written, interleaved in one process; the share of the bound; what writing costs; peak memory. Results go to
WORK/results.json; --against prints the ratio to another such file, made from another commit on the same machine.
"""
import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LAYERS = {"mamba": 24, "jamba": 8, "bamba": 12, "laguna": 8}


def prepare(folder, family, length):
    checkpoint = folder / family
    subprocess.run([sys.executable, HERE / "make_checkpoint.py", family, checkpoint, "--length", str(length),
                    "--sequences", str(max(4, 32768 // length))], check=True, stdout=subprocess.DEVNULL)
    n = LAYERS[family]
    job = {"model": {"checkpoint": str(checkpoint), "device": "cpu"},
           "corpus": {"format": "npy", "path": str(checkpoint / f"tokens-{length}.npy"), "context": length},
           "captures": {"residuals": {"values": ["layer_output"], "layers": [n // 4, n // 2, n - 1]}},
           "store": {"path": str(folder / f"store-{family}")}}
    path = folder / f"{family}-{length}.json"
    path.write_text(json.dumps(job))
    return path


def measure(a, family, dtype, length):
    job = prepare(a.folder, family, length)
    done = subprocess.run([a.program, job, "--rounds", str(a.rounds), "--batches", str(a.batches), "--set",
                           f"model.dtype={dtype}", "--set", f"run.threads={a.threads}"], check=True, capture_output=True,
                          text=True)
    return json.loads(done.stdout)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--program", type=Path, required=True)
    p.add_argument("--folder", type=Path, required=True)
    p.add_argument("--families", default="mamba,jamba,bamba,laguna")
    p.add_argument("--dtypes", default="float32")
    p.add_argument("--lengths", default="512")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--batches", type=int, default=2)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--against", type=Path)
    a = p.parse_args()
    a.folder.mkdir(parents=True, exist_ok=True)
    before = {tuple(r["key"]): r for r in json.loads(a.against.read_text())} if a.against else {}
    results = []
    print(f"{'family':8}{'dtype':10}{'length':>7}{'products':>11}{'forward':>9}{'store':>9}{'share':>8}{'writing':>9}"
          f"{'GFLOP/s':>9}{'peak MB':>9}", flush=True)
    for family in a.families.split(","):
        for dtype in a.dtypes.split(","):
            for length in map(int, a.lengths.split(",")):
                r = measure(a, family, dtype, length)
                r["key"] = [family, dtype, length]
                results.append(r)
                line = (f"{family:8}{dtype:10}{length:7}{r['gemm_tokens_s']:11.0f}{r['forward_tokens_s']:9.0f}"
                        f"{r['store_tokens_s']:9.0f}{r['share_of_gemm_bound']:8.2f}{r['cost_of_writing']:9.1%}"
                        f"{r['gemm_gflops']:9.0f}{r['peak_mb']:9.0f}")
                if tuple(r["key"]) in before:
                    line += f"   {r['store_tokens_s'] / before[tuple(r['key'])]['store_tokens_s']:.2f} x before"
                print(line, flush=True)
    (a.folder / "results.json").write_text(json.dumps(results, indent=1))
    print(f"tokens/s on {a.threads} threads; products: the matrix products alone; share: store over products; "
          f"results in {a.folder / 'results.json'}")


if __name__ == "__main__":
    main()
