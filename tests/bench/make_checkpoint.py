#!/usr/bin/env python3
"""Writes a checkpoint with random weights at the shapes that the benchmarks use, and a corpus to run it on.

  make_checkpoint.py FAMILY FOLDER [--dtype float32|bfloat16] [--length TOKENS] [--sequences N]

Families and shapes (about 120-180 million parameters each; the Mamba one is mamba-130m's):
  mamba   24 layers of 768, 16 states
  jamba    8 layers of 768, attention at 4, mixtures of 8 experts (2 chosen) at the odd ones
  bamba   12 layers of 768, attention at 3 and 9, 24 heads of 64, 128 states
  laguna   8 layers of 768, full attention at 0 and 4, else windows of 512, mixtures of 32 experts (4 chosen)
For measuring starts, mamba370m (48 layers of 1024, 1.5 GB in float32) and mamba1b4 (of 2048, 5.5 GB).
Needs numpy only: a safetensors file is a length, a JSON header and bytes.
"""
import argparse
import json
import struct
from pathlib import Path

import numpy as np


def mamba(d=768, layers=24):
    inner, rank, states = 2 * d, d // 16, 16
    config = dict(architectures=["MambaForCausalLM"], model_type="mamba", vocab_size=50280, hidden_size=d, state_size=states,
                  num_hidden_layers=layers, expand=2, intermediate_size=inner, conv_kernel=4, time_step_rank=rank,
                  use_bias=False, use_conv_bias=True, residual_in_fp32=True, hidden_act="silu", layer_norm_epsilon=1e-5,
                  tie_word_embeddings=True)
    tensors = {"backbone.embeddings.weight": (50280, d), "backbone.norm_f.weight": (d,)}
    for i in range(layers):
        at = f"backbone.layers.{i}."
        tensors[at + "norm.weight"] = (d,)
        tensors |= mamba1(at + "mixer.", d, inner, rank, states)
    return config, tensors


def mamba370m():
    return mamba(1024, 48)


def mamba1b4():
    return mamba(2048, 48)


def mamba1(at, d, inner, rank, states):
    return {at + "in_proj.weight": (2 * inner, d), at + "conv1d.weight": (inner, 1, 4), at + "conv1d.bias": (inner,),
            at + "x_proj.weight": (rank + 2 * states, inner), at + "dt_proj.weight": (inner, rank),
            at + "dt_proj.bias": (inner,), at + "A_log": (inner, states), at + "D": (inner,),
            at + "out_proj.weight": (d, inner)}


def attention(at, d, heads, kv_heads, head_dim):
    return {at + "q_proj.weight": (heads * head_dim, d), at + "k_proj.weight": (kv_heads * head_dim, d),
            at + "v_proj.weight": (kv_heads * head_dim, d), at + "o_proj.weight": (d, heads * head_dim)}


def mlp(at, d, width):
    return {at + "gate_proj.weight": (width, d), at + "up_proj.weight": (width, d), at + "down_proj.weight": (d, width)}


def jamba():
    d, inner, rank, states, width = 768, 1536, 48, 16, 1536
    config = dict(architectures=["JambaForCausalLM"], model_type="jamba", vocab_size=32000, hidden_size=d,
                  intermediate_size=width, num_hidden_layers=8, num_attention_heads=12, num_key_value_heads=4,
                  num_experts=8, num_experts_per_tok=2, expert_layer_period=2, expert_layer_offset=1,
                  attn_layer_period=8, attn_layer_offset=4, mamba_d_state=states, mamba_d_conv=4, mamba_expand=2,
                  mamba_dt_rank=rank, mamba_conv_bias=True, mamba_proj_bias=False, hidden_act="silu", rms_norm_eps=1e-6,
                  tie_word_embeddings=False)
    tensors = {"model.embed_tokens.weight": (32000, d), "lm_head.weight": (32000, d), "model.final_layernorm.weight": (d,)}
    for i in range(8):
        at = f"model.layers.{i}."
        tensors |= {at + "input_layernorm.weight": (d,), at + "pre_ff_layernorm.weight": (d,)}
        if i == 4:
            tensors |= attention(at + "self_attn.", d, 12, 4, 64)
        else:
            tensors |= mamba1(at + "mamba.", d, inner, rank, states)
            tensors |= {at + "mamba.dt_layernorm.weight": (rank,), at + "mamba.b_layernorm.weight": (states,),
                        at + "mamba.c_layernorm.weight": (states,)}
        if i % 2 == 1:
            tensors[at + "feed_forward.router.weight"] = (8, d)
            for e in range(8):
                tensors |= mlp(f"{at}feed_forward.experts.{e}.", d, width)
        else:
            tensors |= mlp(at + "feed_forward.", d, width)
    return config, tensors


def bamba():
    d, width, heads, head_dim, states = 768, 2048, 24, 64, 128
    inner, conv = heads * head_dim, heads * head_dim + 2 * states
    config = dict(architectures=["BambaForCausalLM"], model_type="bamba", vocab_size=32000, hidden_size=d,
                  intermediate_size=width, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
                  attn_layer_indices=[3, 9], mamba_n_heads=heads, mamba_d_head=head_dim, mamba_n_groups=1,
                  mamba_d_state=states, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=256, mamba_conv_bias=True,
                  mamba_proj_bias=False, attention_bias=False, mlp_bias=False, hidden_act="silu", rms_norm_eps=1e-5,
                  max_position_embeddings=262144, tie_word_embeddings=False,
                  rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5))
    tensors = {"model.embed_tokens.weight": (32000, d), "lm_head.weight": (32000, d), "model.final_layernorm.weight": (d,)}
    for i in range(12):
        at = f"model.layers.{i}."
        tensors |= {at + "input_layernorm.weight": (d,), at + "pre_ff_layernorm.weight": (d,)}
        if i in (3, 9):
            tensors |= attention(at + "self_attn.", d, 12, 4, 64)
        else:
            m = at + "mamba."
            tensors |= {m + "in_proj.weight": (inner + conv + heads, d), m + "conv1d.weight": (conv, 1, 4),
                        m + "conv1d.bias": (conv,), m + "dt_bias": (heads,), m + "A_log": (heads,), m + "D": (heads,),
                        m + "norm.weight": (inner,), m + "out_proj.weight": (d, inner)}
        tensors |= mlp(at + "feed_forward.", d, width)
    return config, tensors


def laguna():
    d, head_dim = 768, 64
    kinds = (["full_attention"] + ["sliding_attention"] * 3) * 2
    config = dict(architectures=["LagunaForCausalLM"], model_type="laguna", vocab_size=32000, hidden_size=d,
                  intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12, num_key_value_heads=4,
                  head_dim=head_dim, moe_intermediate_size=256, shared_expert_intermediate_size=256, num_experts=32,
                  num_experts_per_tok=4, sliding_window=512, layer_types=kinds, gating=True, hidden_act="silu",
                  rms_norm_eps=1e-6, max_position_embeddings=131072, tie_word_embeddings=False,
                  mlp_layer_types=["dense"] + ["sparse"] * 7, num_attention_heads_per_layer=[12] * 8,
                  rope_parameters=dict(full_attention=dict(rope_type="default", rope_theta=500000.0, partial_rotary_factor=0.5),
                                       sliding_attention=dict(rope_type="default", rope_theta=10000.0,
                                                              partial_rotary_factor=1.0)))
    tensors = {"model.embed_tokens.weight": (32000, d), "lm_head.weight": (32000, d), "model.norm.weight": (d,)}
    for i in range(8):
        at = f"model.layers.{i}."
        tensors |= {at + "input_layernorm.weight": (d,), at + "post_attention_layernorm.weight": (d,)}
        tensors |= attention(at + "self_attn.", d, 12, 4, head_dim)
        # gating true: the softplus gate is per head
        tensors |= {at + "self_attn.g_proj.weight": (12, d), at + "self_attn.q_norm.weight": (head_dim,),
                    at + "self_attn.k_norm.weight": (head_dim,)}
        if i == 0:
            tensors |= mlp(at + "mlp.", d, 2048)
            continue
        tensors |= {at + "mlp.gate.weight": (32, d), at + "mlp.experts.e_score_correction_bias": (32,)}
        tensors |= mlp(at + "mlp.shared_expert.", d, 256)
        for e in range(32):
            tensors |= mlp(f"{at}mlp.experts.{e}.", d, 256)
    return config, tensors


def values(name, shape, rng):
    """Weights of the size that keeps activations near 1, and steps and decays in Mamba's usual range."""
    if name.endswith("A_log"):
        return np.log(1 + np.arange(shape[-1], dtype=np.float32)) * np.ones(shape, np.float32)
    if "dt_proj.bias" in name or name.endswith("dt_bias"):
        return rng.uniform(-6.9, -2.3, shape).astype(np.float32)
    if "norm" in name or name.endswith(".D"):
        return np.ones(shape, np.float32)
    if len(shape) == 1:
        return np.zeros(shape, np.float32)
    return rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))


def encode(array, dtype):
    if dtype == "float32":
        return array.astype("<f4").tobytes()
    bits = array.astype("<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def write_safetensors(path, tensors, dtype):
    rng, header, at = np.random.default_rng(0), {}, 0
    size = 4 if dtype == "float32" else 2
    for name, shape in tensors.items():
        n = int(np.prod(shape)) * size
        header[name] = dict(dtype="F32" if size == 4 else "BF16", shape=list(shape), data_offsets=[at, at + n])
        at += n
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name, shape in tensors.items():
            f.write(encode(values(name, shape, rng), dtype))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("family", choices=["mamba", "jamba", "bamba", "laguna", "mamba370m", "mamba1b4"])
    p.add_argument("folder", type=Path)
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    p.add_argument("--length", type=int, default=512)
    p.add_argument("--sequences", type=int, default=64)
    a = p.parse_args()
    config, tensors = globals()[a.family]()
    a.folder.mkdir(parents=True, exist_ok=True)
    (a.folder / "config.json").write_text(json.dumps(config | dict(dtype=a.dtype), indent=1))
    if not (a.folder / "model.safetensors").exists():
        write_safetensors(a.folder / "model.safetensors", tensors, a.dtype)
    ids = np.random.RandomState(0).randint(3, config["vocab_size"], (a.sequences, a.length)).astype(np.uint16)
    np.save(a.folder / f"tokens-{a.length}.npy", ids)
    count = sum(int(np.prod(s)) for s in tensors.values())
    print(f"{a.folder}: {a.family}, {count / 1e6:.0f} million parameters, {a.dtype}")


if __name__ == "__main__":
    main()
