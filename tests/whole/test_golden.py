"""Every value of every family against what transformers computes, through the whole program and h5py."""
import pytest

import golden
import harness

# State-space first: what stands on it is judged after it.
ORDER = sorted(harness.CASES, key=lambda name: (not name.startswith("mamba"), name))
BFLOAT16 = [name for name in ORDER if (harness.FIXTURES / name / "golden_float32.h5").exists()]


def check(store, case, load):
    report = golden.compare_store(store, harness.FIXTURES / case, load)
    assert not report.faults, "\n".join(report.faults)
    assert report.agree == len(report.paths) > 0


@pytest.mark.parametrize("case", ORDER)
def test_every_value_in_the_checkpoints_own_dtype(case, tmp_path):
    check(harness.run_case(tmp_path, case), case, "own")


@pytest.mark.parametrize("case", BFLOAT16)
def test_a_float32_load_of_bfloat16_weights(case, tmp_path):
    check(harness.run_case(tmp_path, case, dtype="float32"), case, "float32")


# What the CPU must have, and how oneDNN's products are held down to the same set.
SETS = {"baseline": ((), "SSE41"),
        "avx2": (("avx2", "fma"), "AVX2"),
        "avx512": (("avx512f", "avx512bw", "avx512dq", "avx512vl"), "AVX512_CORE"),
        "avx512-bf16": (("avx512f", "avx512_bf16"), "AVX512_CORE_BF16")}


def cpu_flags():
    lines = [line for line in open("/proc/cpuinfo") if line.startswith("flags")]
    return set(lines[0].split(":")[1].split()) if lines else set()


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("case", ["mamba", "mamba-bf16", "jamba-bf16", "bamba-groups-limit", "laguna-channel-softcap"])
def test_on_each_instruction_set(case, name, tmp_path, monkeypatch):
    needed, library = SETS[name]
    missing = set(needed) - cpu_flags()
    if missing:
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
    monkeypatch.setenv("ACTDUMP_ISA", name.split("-")[0])
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", library)
    check(harness.run_case(tmp_path, case), case, "own")


def test_the_comparison_itself_can_fail(mamba_store, tmp_path):
    """Held against another case's values, and against values moved by a little more than the tolerance."""
    import h5py
    import shutil
    case = shutil.copytree(harness.FIXTURES / "mamba", tmp_path / "case")
    with h5py.File(case / "golden.h5", "r+") as file:
        value = file["sequences/2/layers/1/layer_output"]
        moved = value[...]
        moved[20, 3] += 3e-4 * (1 + abs(moved[20, 3]))
        value[...] = moved
        del file["sequences/0/layers/2/linear_attn/betas"]
    faults = golden.compare_store(mamba_store, case).faults
    assert [f.split(":")[0] for f in faults] == ["everything/layers/1/layer_output", "everything/layers/2/linear_attn/betas"]
