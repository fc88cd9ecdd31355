"""The pool of a rank's KV cache: on the host, or on the device where its pages lie."""

from collections.abc import Sequence

from kvray.connector.device.gpu import DevicePool
from kvray.connector.device.pool import HostPool, Pool
from kvray.connector.model.cache_layout import CacheLayout, Part


def open_pool(layout: CacheLayout, parts: Sequence[Part], *, has_hooks: bool) -> Pool:
    """Return the pool of `layout`.

    Args:
        layout: of this rank.
        parts: what the rank reads and writes of it.
        has_hooks: whether the engine calls before each layer runs.
    """
    if layout.is_host:
        return HostPool(parts)
    num_layers = 1 + max(layer for group in layout.groups for layer in group.layers)
    return DevicePool(parts, num_layers=num_layers, has_hooks=has_hooks)
