"""A distributed KV-cache tier for TensorRT-LLM that lives inside a Ray cluster.

Importing this package imports nothing else: an engine that only wants `kvray.connector` must not
pay for Ray, and a tool that only wants `__version__` must not need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvray.client import Client
    from kvray.config import KVRayConfig, load_config
    from kvray.errors import (
        CapacityError,
        ConfigError,
        CorruptBlock,
        KVRayError,
        LayoutMismatch,
        LeaseExpired,
        ShardUnavailable,
        TierError,
        TransferError,
        TransferTimeout,
        TransportUnavailable,
    )
    from kvray.tensor_cache import TensorCache, TensorMetadata

__version__ = "0.1.0"

__all__ = [
    "CapacityError",
    "Client",
    "ConfigError",
    "CorruptBlock",
    "KVRayConfig",
    "KVRayError",
    "LayoutMismatch",
    "LeaseExpired",
    "ShardUnavailable",
    "TensorCache",
    "TensorMetadata",
    "TierError",
    "TransferError",
    "TransferTimeout",
    "TransportUnavailable",
    "__version__",
    "load_config",
]

_HOMES = {
    "Client": "kvray.client",
    "KVRayConfig": "kvray.config",
    "TensorCache": "kvray.tensor_cache",
    "TensorMetadata": "kvray.tensor_cache",
    "load_config": "kvray.config",
}
"""Where public names live; all others of `__all__` are errors."""


def __getattr__(name: str) -> object:
    """Import a public name from its module when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES.get(name, "kvray.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List all public names, imported or not."""
    return sorted(set(globals()) | set(__all__))
