"""A distributed KV-cache tier for TensorRT-LLM that lives inside a Ray cluster.

Importing this package imports nothing else: an engine that only wants `kvray.connector` must not
pay for Ray, and a tool that only wants `__version__` must not need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvray.client import Client
    from kvray.tensor_cache import TensorCache, TensorMetadata

__version__ = "0.1.0"

__all__ = ["Client", "TensorCache", "TensorMetadata", "__version__"]

_HOMES = {
    "Client": "kvray.client",
    "TensorCache": "kvray.tensor_cache",
    "TensorMetadata": "kvray.tensor_cache",
}


def __getattr__(name: str) -> object:
    """Import a public name from its module when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Name what can be asked for, whether or not it has been imported yet."""
    return sorted(set(globals()) | set(__all__))
