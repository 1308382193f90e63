#!/usr/bin/env python3
"""What people run today, for bench_vs.py: transformers, forward hooks on three layers, h5py with zstd.

  baseline_transformers.py CHECKPOINT TOKENS.npy LAYERS OUT.h5 [--dtype float32|bfloat16] [--tokens 4096] [--threads 2]

No lm_head, no cache, batches of equal sequences without padding. Answers each line of standard input with a pass over the
first `tokens` tokens: {"tokens", "seconds"}, rows written and the file closed. Needs torch, transformers, h5py and hdf5plugin.
"""
import argparse
import json
import os
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import h5py
import hdf5plugin
import numpy as np
import torch
import transformers


def hook(model, layers, got):
    for i in layers:
        def keep(_module, _inputs, out, i=i):
            got[i] = out[0] if isinstance(out, tuple) else out
        model.layers[i].register_forward_hook(keep)


def run(model, ids, layers, got, path):
    """One pass: the forward of all of ids in one batch, and its rows into a file."""
    width = model.config.hidden_size
    start = time.perf_counter()
    with h5py.File(path, "w") as file, torch.no_grad():
        model(ids, use_cache=False)
        for i in layers:
            rows = got[i].reshape(-1, width).float().numpy()
            data = file.create_dataset(f"layer{i}", (0, width), maxshape=(None, width), dtype="float32", chunks=(1024, width),
                                       **hdf5plugin.Zstd(clevel=3))
            data.resize(len(rows), 0)
            data[:] = rows
    return time.perf_counter() - start


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkpoint")
    p.add_argument("corpus")
    p.add_argument("layers", type=lambda text: [int(i) for i in text.split(",")])
    p.add_argument("out")
    p.add_argument("--dtype", default="float32")
    p.add_argument("--tokens", type=int, default=4096)
    p.add_argument("--threads", type=int, default=2)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModel.from_pretrained(a.checkpoint, dtype=getattr(torch, a.dtype)).eval()
    corpus = np.load(a.corpus)
    ids = torch.from_numpy(corpus[:max(1, a.tokens // corpus.shape[1])].astype(np.int64))
    got = {}
    hook(model, a.layers, got)
    run(model, ids[:1, :64], a.layers, got, a.out)
    print(json.dumps({"ready": True, "what": f"transformers {transformers.__version__}, torch {torch.__version__}"}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"tokens": ids.numel(), "seconds": run(model, ids, a.layers, got, a.out)}), flush=True)


if __name__ == "__main__":
    main()
