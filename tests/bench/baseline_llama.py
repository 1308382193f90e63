#!/usr/bin/env python3
"""llama.cpp on a Mamba checkpoint, for bench_vs.py: the same model as a gguf file, prompts evaluated, nothing captured.

  baseline_llama.py CHECKPOINT TOKENS.npy OUT.gguf [--dtype float32|bfloat16] [--tokens 4096] [--threads 2]

The gguf file is written from the checkpoint where it is missing (matrices in `dtype`, all else float32). Each sequence is
one prompt from an empty state; logits are asked for of its last token only, as llama.cpp wants at least one. Answers each
line of standard input with a pass: {"tokens", "seconds"}. Needs llama-cpp-python and gguf from PyPI, the first built natively.
"""
import argparse
import ctypes
import json
import struct
import sys
import time
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

LAYER = {"norm.weight": "attn_norm.weight", "mixer.in_proj.weight": "ssm_in.weight", "mixer.conv1d.weight": "ssm_conv1d.weight",
         "mixer.conv1d.bias": "ssm_conv1d.bias", "mixer.x_proj.weight": "ssm_x.weight", "mixer.dt_proj.weight": "ssm_dt.weight",
         "mixer.dt_proj.bias": "ssm_dt.bias", "mixer.A_log": "ssm_a", "mixer.D": "ssm_d", "mixer.out_proj.weight": "ssm_out.weight"}


def read_tensors(path):
    """name, float32 array: the benchmarks' checkpoints are float32."""
    data = np.memmap(path, np.uint8, "r")
    (size,) = struct.unpack("<Q", data[:8].tobytes())
    for name, t in json.loads(data[8:8 + size].tobytes()).items():
        begin, end = t["data_offsets"]
        yield name, data[8 + size + begin:8 + size + end].view("<f4").reshape(t["shape"])


def rename(name):
    if name == "backbone.embeddings.weight":
        return "token_embd.weight"
    if name == "backbone.norm_f.weight":
        return "output_norm.weight"
    layer, rest = name.removeprefix("backbone.layers.").split(".", 1)
    return f"blk.{layer}.{LAYER[rest]}"


def convert(checkpoint, path, dtype):
    config = json.loads((checkpoint / "config.json").read_text())
    w = gguf.GGUFWriter(str(path), "mamba")
    w.add_context_length(2**20)
    w.add_embedding_length(config["hidden_size"])
    w.add_feed_forward_length(0)
    w.add_head_count(0)
    w.add_block_count(config["num_hidden_layers"])
    w.add_ssm_conv_kernel(config["conv_kernel"])
    w.add_ssm_inner_size(config["intermediate_size"])
    w.add_ssm_state_size(config["state_size"])
    w.add_ssm_time_step_rank(config["time_step_rank"])
    w.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    w.add_vocab_size(config["vocab_size"])
    w.add_tokenizer_model("none")
    for name, x in read_tensors(checkpoint / "model.safetensors"):
        x = -np.exp(x) if name.endswith("A_log") else x.squeeze(1) if name.endswith("conv1d.weight") else x
        is_matrix = name.endswith(("_proj.weight", "embeddings.weight"))
        if dtype == "bfloat16" and is_matrix:
            w.add_tensor(rename(name), gguf.quants.quantize(np.ascontiguousarray(x), gguf.GGMLQuantizationType.BF16),
                         raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            w.add_tensor(rename(name), np.ascontiguousarray(x, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def open_model(path, length, threads):
    llama_cpp.llama_backend_init()
    options = llama_cpp.llama_model_default_params()
    options.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = settings.n_batch = length
    settings.n_ubatch = min(length, 512)
    settings.n_threads = settings.n_threads_batch = threads
    return model, llama_cpp.llama_init_from_model(model, settings)


def run(context, prompts):
    start = time.perf_counter()
    for ids in prompts:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        array = (llama_cpp.llama_token * len(ids))(*ids)
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(ids))) != 0:
            sys.exit("llama_decode failed")
    llama_cpp.llama_synchronize(context)
    return time.perf_counter() - start


@llama_cpp.llama_log_callback
def be_quiet(_level, _text, _data):
    pass


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkpoint", type=Path)
    p.add_argument("corpus")
    p.add_argument("out", type=Path)
    p.add_argument("--dtype", default="float32")
    p.add_argument("--tokens", type=int, default=4096)
    p.add_argument("--threads", type=int, default=2)
    a = p.parse_args()
    llama_cpp.llama_log_set(be_quiet, ctypes.c_void_p(0))
    if not a.out.exists():
        convert(a.checkpoint, a.out, a.dtype)
    corpus = np.load(a.corpus)
    prompts = corpus[:max(1, a.tokens // corpus.shape[1])].tolist()
    _model, context = open_model(a.out, corpus.shape[1], a.threads)
    run(context, prompts[:1])
    print(json.dumps({"ready": True, "what": f"llama-cpp-python {llama_cpp.__version__}"}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"tokens": sum(map(len, prompts)), "seconds": run(context, prompts)}), flush=True)


if __name__ == "__main__":
    main()
