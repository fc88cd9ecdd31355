"""The engine's pool of blocks as bytes, on the host or on a device.

A pool is a tensor of shape [num_blocks, num_layers, kv_factor, block_elems]; one block is one
contiguous range of bytes, whatever the element type.
"""

from typing import Any, Protocol

import numpy as np
import torch

from kvray.errors import ConfigError
from kvray.store import Arena, Lease
from kvray.store.tables import Array

_DIMENSIONS = 4


class Pool(Protocol):
    """What the worker does with the engine's memory."""

    block_bytes: int
    is_host: bool

    def load(
        self, arena: Arena, lease: Lease, block_ids: Array, *, first: int, verify: bool
    ) -> None:
        """Copy leased blocks into the pool; they are there when the call returns."""

    def source(self, block_ids: Array) -> tuple[Array, Array]:
        """Return (bytes [n, block_bytes], rows) from which a saver thread may read blocks.

        Host: the pool itself, which the saver must have read before the next pass. Device: a copy.
        """


def open_pool(tensor: torch.Tensor) -> Pool:
    """Return the pool behind the tensor that the engine registers.

    Raises:
        ConfigError: a layout that does not hold whole blocks.
    """
    if tensor.dim() != _DIMENSIONS or not tensor.is_contiguous():
        raise ConfigError(
            f"The KV pool has shape {list(tensor.shape)}, contiguous: {tensor.is_contiguous()};"
            " kvray serves contiguous pools [num_blocks, num_layers, kv_factor, block_elems]."
        )
    rows = tensor.view(torch.uint8).reshape(tensor.shape[0], -1)
    return HostPool(rows) if tensor.device.type == "cpu" else DevicePool(rows)


class HostPool:
    """A pool in host memory: slots are copied straight into its rows and out of them."""

    is_host = True

    def __init__(self, rows: torch.Tensor) -> None:
        """Serve `rows`, bytes of shape [num_blocks, block_bytes]."""
        self._rows: Array = rows.numpy()
        self.block_bytes = rows.shape[1]

    def load(
        self, arena: Arena, lease: Lease, block_ids: Array, *, first: int, verify: bool
    ) -> None:
        """See `Pool.load`."""
        arena.read(lease, self._rows, block_ids, first=first, verify=verify)

    def source(self, block_ids: Array) -> tuple[Array, Array]:
        """See `Pool.source`."""
        return self._rows, block_ids


class DevicePool:
    """A pool in device memory, reached through one staging copy on the engine's current stream."""

    is_host = False

    def __init__(self, rows: torch.Tensor) -> None:
        """Serve `rows`, bytes of shape [num_blocks, block_bytes]."""
        self._rows = rows
        self.block_bytes = rows.shape[1]

    def load(
        self, arena: Arena, lease: Lease, block_ids: Array, *, first: int, verify: bool
    ) -> None:
        """See `Pool.load`."""
        staging = np.empty((len(block_ids), self.block_bytes), dtype=np.uint8)
        arena.read(lease, staging, np.arange(len(block_ids)), first=first, verify=verify)
        rows = torch.from_numpy(block_ids).to(self._rows.device)
        self._rows[rows] = torch.from_numpy(staging).to(self._rows.device)
        _synchronize(self._rows)

    def source(self, block_ids: Array) -> tuple[Array, Array]:
        """See `Pool.source`."""
        copied: Any = self._rows[torch.from_numpy(block_ids).to(self._rows.device)].cpu()
        return copied.numpy(), np.arange(len(block_ids))


def _synchronize(rows: torch.Tensor) -> None:
    if rows.is_cuda:
        torch.cuda.current_stream(rows.device).synchronize()
