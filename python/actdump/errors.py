"""What can be wrong with a store. Each message names the file, what was found and what was expected."""


class StoreError(Exception):
    """The store cannot be used, or cannot be used so."""


class VersionError(StoreError):
    """store.json has a version that this package does not read."""


class SegmentError(StoreError):
    """A segment is missing, has another size, or is not what store.json says."""


class MissingPlugin(StoreError):
    """HDF5 has no zstd filter: hdf5plugin is not installed, or does not fit this h5py."""
