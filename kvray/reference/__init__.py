"""A small real engine that calls a connector in TensorRT-LLM's order; it needs no GPU.

The engine itself is loaded at first use: a process that only starts replicas never imports torch.
"""

from typing import TYPE_CHECKING

from kvray.reference.engine_options import KvConnectorConfig
from kvray.reference.output import Call, Output
from kvray.reference.replica import Replica
from kvray.reference.weights import find_weights

if TYPE_CHECKING:
    from kvray.reference.engine import ReferenceEngine

__all__ = [
    "Call",
    "KvConnectorConfig",
    "Output",
    "ReferenceEngine",
    "Replica",
    "find_weights",
]


def __getattr__(name: str) -> object:
    if name != "ReferenceEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvray.reference.engine import ReferenceEngine

    return ReferenceEngine
