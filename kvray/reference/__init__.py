"""A small real engine that calls a connector in TensorRT-LLM's order; it needs no GPU.

Names are loaded at first use, so that a process which only starts replicas never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvray.reference.engine import Pending, ReferenceEngine
    from kvray.reference.llm_args import KvCacheConfig, KvConnectorConfig, LlmArgs
    from kvray.reference.output import Output
    from kvray.reference.replica import Replica
    from kvray.reference.weights import find_weights

__all__ = [
    "KvCacheConfig",
    "KvConnectorConfig",
    "LlmArgs",
    "Output",
    "Pending",
    "ReferenceEngine",
    "Replica",
    "find_weights",
]

_HOMES = {
    "KvCacheConfig": "llm_args",
    "KvConnectorConfig": "llm_args",
    "LlmArgs": "llm_args",
    "Output": "output",
    "Pending": "engine",
    "ReferenceEngine": "engine",
    "Replica": "replica",
    "find_weights": "weights",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
