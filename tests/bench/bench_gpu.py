#!/usr/bin/env python3
"""What `make bench-gpu` runs: mamba-2.8b's, Bamba-9B's, Jamba-Reasoning-3B's and Laguna-XS's shapes with random weights, in
bfloat16 at 2048 tokens a sequence, three layers of layer_output captured.

  bench_gpu.py --program bench_gpu --folder WORK [--models mamba-2.8b,...] [--rounds 5] [--batches 4]

Where there is no GPU it says so and measures nothing. Checkpoints (5 to 67 GB each) are written into WORK once; name
models to have fewer. Results go to WORK/results-gpu.json.
"""
import argparse
import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np

from make_checkpoint import attention, mamba1, mlp

CONTEXT = 2048


def mamba_2_8b():
    d, inner, rank, states, n = 2560, 5120, 160, 16, 64
    config = dict(architectures=["MambaForCausalLM"], model_type="mamba", vocab_size=50280, hidden_size=d, state_size=states,
                  num_hidden_layers=n, expand=2, intermediate_size=inner, conv_kernel=4, time_step_rank=rank,
                  use_bias=False, use_conv_bias=True, residual_in_fp32=True, hidden_act="silu", layer_norm_epsilon=1e-5,
                  tie_word_embeddings=True)
    tensors = {"backbone.embeddings.weight": (50280, d), "backbone.norm_f.weight": (d,)}
    for i in range(n):
        at = f"backbone.layers.{i}."
        tensors |= {at + "norm.weight": (d,)} | mamba1(at + "mixer.", d, inner, rank, states)
    return config, tensors


def jamba_3b():
    d, inner, rank, states, width, n = 2560, 5120, 160, 16, 8192, 28
    config = dict(architectures=["JambaForCausalLM"], model_type="jamba", vocab_size=65536, hidden_size=d,
                  intermediate_size=width, num_hidden_layers=n, num_attention_heads=20, num_key_value_heads=1,
                  num_experts=1, num_experts_per_tok=1, expert_layer_period=2, expert_layer_offset=1, attn_layer_period=14,
                  attn_layer_offset=7, mamba_d_state=states, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=rank,
                  mamba_conv_bias=True, mamba_proj_bias=False, hidden_act="silu", rms_norm_eps=1e-6,
                  tie_word_embeddings=True)
    tensors = {"model.embed_tokens.weight": (65536, d), "model.final_layernorm.weight": (d,)}
    for i in range(n):
        at = f"model.layers.{i}."
        tensors |= {at + "input_layernorm.weight": (d,), at + "pre_ff_layernorm.weight": (d,)}
        if i % 14 == 7:
            tensors |= attention(at + "self_attn.", d, 20, 1, 128)
        else:
            tensors |= mamba1(at + "mamba.", d, inner, rank, states)
            tensors |= {at + "mamba.dt_layernorm.weight": (rank,), at + "mamba.b_layernorm.weight": (states,),
                        at + "mamba.c_layernorm.weight": (states,)}
        tensors |= mlp(at + "feed_forward.", d, width)
    return config, tensors


def bamba_9b():
    d, width, heads, head_dim, states, n = 4096, 14336, 128, 64, 128, 32
    inner, conv, attending = heads * head_dim, heads * head_dim + 2 * states, [9, 18, 27]
    config = dict(architectures=["BambaForCausalLM"], model_type="bamba", vocab_size=128256, hidden_size=d,
                  intermediate_size=width, num_hidden_layers=n, num_attention_heads=32, num_key_value_heads=8,
                  attn_layer_indices=attending, mamba_n_heads=heads, mamba_d_head=head_dim, mamba_n_groups=1,
                  mamba_d_state=states, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=256, mamba_conv_bias=True,
                  mamba_proj_bias=False, attention_bias=False, mlp_bias=False, hidden_act="silu", rms_norm_eps=1e-5,
                  max_position_embeddings=262144, tie_word_embeddings=False,
                  rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5))
    tensors = {"model.embed_tokens.weight": (128256, d), "lm_head.weight": (128256, d), "model.final_layernorm.weight": (d,)}
    for i in range(n):
        at = f"model.layers.{i}."
        tensors |= {at + "input_layernorm.weight": (d,), at + "pre_ff_layernorm.weight": (d,)}
        if i in attending:
            tensors |= attention(at + "self_attn.", d, 32, 8, 128)
        else:
            m = at + "mamba."
            tensors |= {m + "in_proj.weight": (inner + conv + heads, d), m + "conv1d.weight": (conv, 1, 4),
                        m + "conv1d.bias": (conv,), m + "dt_bias": (heads,), m + "A_log": (heads,), m + "D": (heads,),
                        m + "norm.weight": (inner,), m + "out_proj.weight": (d, inner)}
        tensors |= mlp(at + "feed_forward.", d, width)
    return config, tensors


def laguna_xs():
    d, heads, kv_heads, head_dim, experts, expert_width, n = 2048, 48, 8, 128, 256, 512, 40
    kinds = (["full_attention"] + ["sliding_attention"] * 3) * (n // 4)
    rope = dict(rope_type="default", rope_theta=500000.0, partial_rotary_factor=0.5)
    config = dict(architectures=["LagunaForCausalLM"], model_type="laguna", vocab_size=100352, hidden_size=d,
                  intermediate_size=8192, num_hidden_layers=n, num_attention_heads=heads, num_key_value_heads=kv_heads,
                  head_dim=head_dim, moe_intermediate_size=expert_width, shared_expert_intermediate_size=expert_width,
                  num_experts=experts, num_experts_per_tok=8, sliding_window=512, layer_types=kinds, gating=True,
                  hidden_act="silu", rms_norm_eps=1e-6, max_position_embeddings=131072, tie_word_embeddings=False,
                  mlp_layer_types=["dense"] + ["sparse"] * (n - 1), num_attention_heads_per_layer=[heads] * n,
                  rope_parameters=dict(full_attention=rope, sliding_attention=rope | dict(rope_theta=10000.0,
                                                                                           partial_rotary_factor=1.0)))
    tensors = {"model.embed_tokens.weight": (100352, d), "lm_head.weight": (100352, d), "model.norm.weight": (d,)}
    for i in range(n):
        at = f"model.layers.{i}."
        tensors |= {at + "input_layernorm.weight": (d,), at + "post_attention_layernorm.weight": (d,)}
        tensors |= attention(at + "self_attn.", d, heads, kv_heads, head_dim)
        tensors |= {at + "self_attn.g_proj.weight": (heads, d), at + "self_attn.q_norm.weight": (head_dim,),
                    at + "self_attn.k_norm.weight": (head_dim,)}
        if i == 0:
            tensors |= mlp(at + "mlp.", d, 8192)
            continue
        tensors |= {at + "mlp.gate.weight": (experts, d), at + "mlp.experts.e_score_correction_bias": (experts,)}
        tensors |= mlp(at + "mlp.shared_expert.", d, expert_width)
        for e in range(experts):
            tensors |= mlp(f"{at}mlp.experts.{e}.", d, expert_width)
    return config, tensors


MODELS = {"mamba-2.8b": mamba_2_8b, "bamba-9b": bamba_9b, "jamba-reasoning-3b": jamba_3b, "laguna-xs": laguna_xs}


def to_bf16(array):
    bits = np.ascontiguousarray(array, "<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


class Weights:
    """bfloat16 values of the size that keeps activations near 1. One block of random numbers serves all: what the numbers
    are makes no difference to the time, only that they are not all alike."""

    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.normal = self.rng.standard_normal(1 << 24, np.float32)

    def pieces(self, name, shape):
        n = int(np.prod(shape))
        if name.endswith("A_log"):
            yield to_bf16(np.log(1 + np.arange(shape[-1], dtype=np.float32)) * np.ones(shape, np.float32))
        elif "dt_proj.bias" in name or name.endswith("dt_bias"):
            yield to_bf16(self.rng.uniform(-6.9, -2.3, shape).astype(np.float32))
        elif "norm" in name or name.endswith(".D"):
            yield to_bf16(np.ones(shape, np.float32))
        elif len(shape) == 1:
            yield to_bf16(np.zeros(shape, np.float32))
        else:
            scaled = to_bf16(np.roll(self.normal, int(self.rng.integers(1 << 24))) / np.sqrt(shape[-1]))
            for first in range(0, n, scaled.size):
                yield scaled[:min(scaled.size, n - first)]


def write_checkpoint(folder, config, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | dict(dtype="bfloat16"), indent=1))
    path, header, at, weights = folder / "model.safetensors", {}, 0, Weights()
    for name, shape in tensors.items():
        n = int(np.prod(shape)) * 2
        header[name] = dict(dtype="BF16", shape=list(shape), data_offsets=[at, at + n])
        at += n
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if path.exists() and path.stat().st_size == 8 + len(text) + at:
        return
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name, shape in tensors.items():
            for piece in weights.pieces(name, shape):
                f.write(piece.tobytes())


def measure(a, model):
    config, tensors = MODELS[model]()
    folder, n = a.folder / model, config["num_hidden_layers"]
    write_checkpoint(folder, config, tensors)
    ids = np.random.RandomState(0).randint(3, config["vocab_size"], (64, CONTEXT)).astype(np.int32)
    np.save(folder / "tokens.npy", ids)
    job = {"model": {"checkpoint": str(folder), "device": "cuda", "dtype": "bfloat16"},
           "corpus": {"format": "npy", "path": str(folder / "tokens.npy"), "context": CONTEXT},
           "captures": {"residuals": {"values": ["layer_output"], "layers": [n // 4, n // 2, n - 1]}},
           "store": {"path": str(a.folder / f"store-{model}")}, "run": {"batch_tokens": 8 * CONTEXT}}
    path = a.folder / f"{model}.json"
    path.write_text(json.dumps(job))
    done = subprocess.run([a.program, path, "--rounds", str(a.rounds), "--batches", str(a.batches)], check=True,
                          capture_output=True, text=True)
    return json.loads(done.stdout) | dict(model=model)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--program", type=Path, required=True)
    p.add_argument("--folder", type=Path, required=True)
    p.add_argument("--models", default=",".join(MODELS))
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--batches", type=int, default=4)
    a = p.parse_args()
    there = subprocess.run([a.program, "--probe"], capture_output=True, text=True)
    if there.returncode == 77:
        print(f"nothing measured: {there.stdout.strip()}. No figures exist for this machine.")
        return
    if there.returncode != 0:
        sys.exit(there.stderr)
    a.folder.mkdir(parents=True, exist_ok=True)
    results = []
    print(f"{'model':20}{'tokens/s':>10}{'stored':>10}{'of sheet':>10}{'of cuBLAS':>10}{'capture':>9}{'bus':>7}{'zstd':>7}")
    for model in a.models.split(","):
        r = measure(a, model)
        results.append(r)
        print(f"{model:20}{r['tokens_s']:10.0f}{r['stored_tokens_s']:10.0f}{r['share_of_published_peak']:10.1%}"
              f"{r['share_of_measured_peak']:10.1%}{r['cost_of_capturing']:9.1%}{r['bus_utilisation']:7.1%}"
              f"{r['compressor_utilisation']:7.1%}", flush=True)
    (a.folder / "results-gpu.json").write_text(json.dumps(results, indent=1))
    print(f"bfloat16, {CONTEXT} tokens a sequence; share of the data sheet's peak and of what cuBLAS reaches, in matrix "
          f"products; results in {a.folder / 'results-gpu.json'}")


if __name__ == "__main__":
    main()
