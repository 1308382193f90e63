#!/usr/bin/env python3
"""Writes the cases of this folder: options of the four families that the cases in ../fixtures do not have, each with a
document of 310 tokens, longer than every chunk and window.

  make_options.py MAKE_FIXTURES.PY

The argument is the script that made ../fixtures; needs torch and transformers. Of the long document only a few values
are kept, so that the files stay small.
"""
import importlib.util
import json
import sys
from pathlib import Path

import h5py
import torch

HERE = Path(__file__).parent
LENGTHS = [7, 310]
LONG = ("layer_output", "attention_output", "linear_attn/attention_head_outputs", "state_output", "mlp/mlp_output",
        "logits", "next_token_probs", "input_ids", "expert_indices")

spec = importlib.util.spec_from_file_location("make_fixtures", sys.argv[1])
fixtures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fixtures)

SMALL = dict(vocab_size=23)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=64, beta_fast=20.0,
            beta_slow=2.0)
CASES = {
    # inner width of its own, automatic rank, one tap, biases, untied, a stream of the load's dtype, in shards
    "mamba-odd": dict(make=lambda: fixtures.mamba(
        **SMALL, hidden_size=20, intermediate_size=36, state_size=5, num_hidden_layers=2, conv_kernel=1,
        time_step_rank="auto", use_bias=True, residual_in_fp32=False, tie_word_embeddings=False), shard="6KB"),
    "mamba-bf16-stream": dict(make=lambda: fixtures.mamba(**SMALL, hidden_size=16, state_size=4,
                                                          residual_in_fp32=False, num_hidden_layers=2,
                                                          conv_kernel=5), dtype="bfloat16",
                              lengths=[9] * 12),  # enough of them for root mean squares to mean something
    "mamba-f16": dict(make=lambda: fixtures.mamba(**SMALL, num_hidden_layers=1), dtype="float16"),
    # attention and mixture in one block, one key/value head, biases where there were none and the other way round
    "jamba-mixed": dict(make=lambda: fixtures.jamba(
        **SMALL, hidden_size=16, intermediate_size=20, num_hidden_layers=3, num_key_value_heads=1, num_experts=3,
        num_experts_per_tok=2, expert_layer_period=1, expert_layer_offset=0, attn_layer_period=2, attn_layer_offset=1,
        mamba_dt_rank="auto", mamba_proj_bias=True, mamba_conv_bias=False, mamba_d_conv=3, tie_word_embeddings=True)),
    # every bias, groups of two heads, an old config
    "bamba-bias": dict(make=lambda: fixtures.bamba(
        **SMALL, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head="auto", mamba_n_groups=4,
        mamba_d_state=6, mamba_chunk_size=16, attention_bias=True, mlp_bias=True, mamba_proj_bias=True,
        mamba_conv_bias=False, tie_word_embeddings=True), old=True),
    "bamba-yarn": dict(make=lambda: fixtures.bamba(
        **SMALL, hidden_size=32, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, attn_layer_indices=[0], mamba_n_heads=4, mamba_d_head=16, mamba_d_state=4,
        rope_parameters=dict(YARN, partial_rotary_factor=1.0, truncate=False))),
    # gate by `true`, biases, rotary the other way round, a window of 3, one expert a token, tied
    "laguna-turned": dict(make=lambda: fixtures.laguna(
        **SMALL, hidden_size=16, intermediate_size=20, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, sliding_window=3, moe_intermediate_size=12,
        shared_expert_intermediate_size=10, num_experts=5, num_experts_per_tok=1, gating=True, attention_bias=True,
        moe_routed_scaling_factor=0.7, moe_router_logit_softcapping=1.5, tie_word_embeddings=True,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        num_attention_heads_per_layer=[3, 2, 1], mlp_layer_types=["sparse", "dense", "sparse"],
        rope_parameters={"sliding_attention": dict(YARN, partial_rotary_factor=0.5, attention_factor=0.9),
                         "full_attention": dict(rope_type="default", rope_theta=500.0,
                                                partial_rotary_factor=0.75)})),
}


def shrink(path):
    with h5py.File(path) as old, h5py.File(path.with_suffix(".new"), "w") as new:
        new.attrs.update(old.attrs)

        def copy(name, item):
            long = int(name.split("/")[1]) == 1 if name.count("/") else False
            if isinstance(item, h5py.Dataset) and (not long or name.endswith(LONG)):
                packed = dict(compression="gzip", compression_opts=9, shuffle=True) if item.size > 256 else {}
                new.create_dataset(name, data=item[...], **packed)

        old.visititems(copy)
    path.with_suffix(".new").rename(path)


def spell_as_of_old(config):
    config["torch_dtype"] = config.pop("dtype")
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["layers_block_type"] = ["attention" if i in config["attn_layer_indices"] else "mamba"
                                   for i in range(config["num_hidden_layers"])]
    config["mamba_d_head"] = "auto"
    config["time_step_limit"] = None
    return config


def main():
    fixtures.record_functions(lambda: fixtures.current)
    for name, case in CASES.items():
        lengths = case.get("lengths", LENGTHS)
        fixtures.write_case(name, case, HERE, 7, lengths)
        folder = HERE / name
        if name == "mamba-f16":  # what counts is the float32 run of the same weights
            (folder / "golden_float32.h5").rename(folder / "golden.h5")
        for golden in folder.glob("golden*.h5"):
            if lengths is LENGTHS:
                shrink(golden)
        for corpus in folder.glob("corpus.*"):
            corpus.unlink()
        for file in folder.iterdir():
            file.chmod(0o644)
        if case.get("old"):
            path = folder / "config.json"
            path.write_text(json.dumps(spell_as_of_old(json.loads(path.read_text())), indent=2))
        print(name, sum(f.stat().st_size for f in folder.iterdir()) // 1024, "KiB")


main()
