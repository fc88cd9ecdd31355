"""TensorRT-LLM's connector classes: its own where it is installed, else what they bring along.

Source: `tensorrt_llm._torch.pyexecutor.kv_cache_connector` up to 1.2 and
`tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector` after it. kvray's two halves have
the union of the methods that those versions call, so one connector serves all of them.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

UPSTREAM_MODULES = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)


@dataclass
class RequestData:
    """What one pass has that is new about one request.

    `new_tokens` and `new_block_ids` are append-deltas over the request's whole life, the first with
    all of it. `computed_position` is where the pass begins, without the tokens that the connector
    matched for this very pass; `num_scheduled_tokens` is how far it goes.
    """

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int
    block_hashes: list[int] = field(default_factory=list)
    priorities: list[int] | None = None
    cache_salt: str | None = None
    new_block_ids_by_layer_group: list[list[int]] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    """The requests of one pass: those reported for the first time, and all others."""

    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)
    attention_dp_rank: int | None = None


class KvCacheConnectorScheduler:
    """The leader's half: decides what is loaded. On rank 0, or with attention DP on every rank."""

    supports_attention_dp = False

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args


class KvCacheConnectorWorker:
    """Every rank's half: moves the bytes."""

    supports_attention_dp = False

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: object | None = None

    def bind_connector_meta(self, metadata: object) -> None:
        """Keep what the scheduler built for the coming pass."""
        self._metadata = metadata

    def get_connector_meta(self) -> object | None:
        """Return the metadata of the pass, or None before the first one."""
        return self._metadata

    def register_forward_pass_callable(self) -> Callable[[], None] | None:
        """Return a callable that the engine runs after every forward pass, warm-up included."""
        return None


def find_upstream(modules: Sequence[str] = UPSTREAM_MODULES) -> ModuleType | None:
    """Return TensorRT-LLM's connector module, or None where there is no TensorRT-LLM.

    An ImportError of one that is there is not hidden: our own classes would give an engine that
    rejects the connector without a reason.
    """
    for path in modules:
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{path}.".startswith(f"{error.name}."):
                raise
    return None


def asks_every_rank() -> bool:
    """Whether the runtime asks every rank's connector under attention data parallelism."""
    halves = (KvCacheConnectorScheduler, KvCacheConnectorWorker)
    return all(hasattr(half, "supports_attention_dp") for half in halves)


def takes_offers_later() -> bool:
    """Whether the runtime may come back for an offer after passes, until it cancels it."""
    return hasattr(KvCacheConnectorScheduler, "cancel_load")


def hashes_blocks() -> bool:
    """Whether reports have hashes of all of a request's blocks, with the first cache manager.

    Source: `commitAndGetBlockHashesForRequest`, from #14806 on. It raises once an attention window
    has let a block go, which ends the engine.
    """
    return "block_hashes" in vars(RequestData)["__dataclass_fields__"]


def version_numbers() -> list[int]:
    """Return TensorRT-LLM's version, comparable: major, minor, patch, candidate.

    A release is behind all of its candidates; a runtime that names no version is behind all.
    """
    tensorrt_llm = sys.modules.get("tensorrt_llm")
    version = getattr(tensorrt_llm, "__version__", None)
    found = re.match(r"(\d+)\.(\d+)\.(\d+)(?:rc(\d+))?", str(version))
    return [99 if one is None else int(one) for one in found.groups()] if found else [99]


if not TYPE_CHECKING:
    _upstream = find_upstream()
    if _upstream is not None:
        KvCacheConnectorScheduler = _upstream.KvCacheConnectorScheduler
        KvCacheConnectorWorker = _upstream.KvCacheConnectorWorker
        RequestData = _upstream.RequestData
        SchedulerOutput = _upstream.SchedulerOutput
