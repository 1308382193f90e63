"""What a checkpoint's dtype is loaded as: float16 files give the values of the same numbers kept in float32."""
import numpy as np
import pytest

import harness

CASES = ["mamba", "jamba", "bamba", "laguna-channel-softcap"]


def rounded(as_float16):
    """Edits tensors to float16, or to float32 of the same numbers."""
    def edit(tensors):
        for name, (_, array) in tensors.items():
            half = array.astype(np.float16)
            tensors[name] = ("F16", half) if as_float16 else ("F32", half.astype(np.float32))
    return edit


def run(folder, case, as_float16, **options):
    folder.mkdir()
    dtype = "float16" if as_float16 else "float32"
    checkpoint = harness.copy_checkpoint(case, folder / "model", config=lambda c: c.update(dtype=dtype),
                                         tensors=rounded(as_float16))
    return harness.run_case(folder, case, checkpoint=checkpoint, run={"threads": 1}, **options)


@pytest.mark.parametrize("load", [None, "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_float16_files_load(case, load, tmp_path):
    half, single = (run(tmp_path / str(f), case, f, dtype=load) for f in (True, False))
    assert harness.manifest(half)["model"]["load_dtype"] == (load or "float32")
    wanted = harness.read_values(single)
    for path, values in harness.read_values(half).items():
        assert np.array_equal(values, wanted[path], equal_nan=True), path


def test_a_config_may_say_torch_dtype(tmp_path):
    checkpoint = harness.copy_checkpoint("mamba", tmp_path / "model",
                                         config=lambda c: c.update(torch_dtype=c.pop("dtype")))
    store = harness.run_case(tmp_path, "mamba", checkpoint=checkpoint)
    assert harness.manifest(store)["model"]["load_dtype"] == "float32"
