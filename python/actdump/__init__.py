"""Reads actdump's stores of activations.

store = actdump.open("out/sample-mamba")
stream = store["residuals/layers/3/layer_output"]
stream[:1000]              # float32, [row hidden_size]
stream.tensor(slice(1000)) # torch.bfloat16 where that is what was stored
"""

from actdump.errors import MissingPlugin, SegmentError, StoreError, VersionError
from actdump.store import Capture, Store, Value

__all__ = ["Capture", "MissingPlugin", "SegmentError", "Store", "StoreError", "Value", "VersionError", "open"]
__version__ = "0.1.0"


def open(path, check: bool = True) -> Store:  # noqa: A001 (actdump.open is what people type)
    """Opens the store in folder `path`; see Store."""
    return Store(path, check=check)
