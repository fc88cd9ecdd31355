"""The NVMe tier of a node: blocks in segment files, which outlive every process."""

from kvray.store.nvme.store import NvmeStore
from kvray.store.nvme.terms import Demotion, NvmeSpec, NvmeStats

__all__ = ["Demotion", "NvmeSpec", "NvmeStats", "NvmeStore"]
