"""A small real engine that calls a connector in TensorRT-LLM's order; it needs no GPU.

`kvray.reference.engine` has the engine itself, and torch: a process that only starts replicas never
imports them.
"""

from kvray.reference.engine_options import KvConnectorConfig
from kvray.reference.output import Output
from kvray.reference.replica import Replica
from kvray.reference.weights import find_weights

__all__ = ["KvConnectorConfig", "Output", "Replica", "find_weights"]
