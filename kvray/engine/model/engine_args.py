"""What an engine says of itself: the settings that decide what its blocks are, and who shares them.

Each connector reads them from its own engine, which names them in its own way, and differently from
version to version. Arguments are pydantic models or dataclasses, requests may be C++ objects with
Python attributes beside them. Settings are texts or enumerations. Every field is read with a
default, and none is ever written.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from numbers import Integral, Real
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

from kvray.engine.model.checkpoint import CheckpointConfig


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """The engine's settings that decide what its blocks are and which of them may be shared."""

    model: str  # the checkpoint's path, or its name on a hub
    tokens_per_block: int
    num_ranks: int
    rank: int
    block_reuse: bool
    partial_reuse: bool
    quantization: str  # weight and KV quantisation as the engine names them, as one text
    overrides: str
    """What changes the checkpoint's own configuration or weights, as one text."""
    attention_backend: str
    engine: str
    ranks_per_node: int  # how many ranks a node has; 0: not said, and all are on one
    attention_dp: bool  # each rank has a whole KV cache for requests of its own
    is_compiled: bool  # the model is compiled by torch: hooks on its layers may not fire
    windows: tuple[int, ...]
    """The different attention windows that the engine was told of, in tokens, ascending."""
    adapters: str
    """How the engine reads LoRA adapters, as one text; enters the keys of requests with one."""
    checkpoint: CheckpointConfig
    is_sparse: bool
    """Attention picks its tokens by an index that is cached beside keys and values."""
    spread_setting: str
    """What a person sets to say how many ranks a node has."""
    asks_again: bool
    """The engine may be told to ask again later, and schedules other requests meanwhile."""
    holds_loads: bool
    """Its ranks copy and check blocks before they are promised, so the leader checks none."""
    drafts_tokens: bool
    """The engine drafts tokens and takes back the pages of those it rejects, without a word; so a
    page that was reported for an answer may belong to others by now."""
    weights_may_change: bool
    """The engine is set up to have its weights replaced while it runs."""
    takes_offers_later: bool
    """The engine may come back for an offer after passes, until it cancels it."""

    @cached_property
    def num_parts_ranks(self) -> int:
        """Ranks that each hold a share of every request's KV; with attention DP there is one."""
        return 1 if self.attention_dp else self.num_ranks

    @cached_property
    def part_rank(self) -> int:
        """This rank among them."""
        return 0 if self.attention_dp else self.rank

    @cached_property
    def is_spread(self) -> bool:
        """Whether, by `ranks_per_node`, ranks that share a request are on several nodes."""
        return not self.attention_dp and 0 < self.ranks_per_node < self.num_ranks


_NO_FIELD = "kvray_asks_for_no_such_field"


def field_of(source: Any, name: str) -> Any:
    """Return a field of an engine's object; None if it is not there.

    A value that has every attribute one asks for was made up by the asking: it is no value.
    """
    value = getattr(source, name, None)
    return None if value is None or hasattr(value, _NO_FIELD) else value


def number_of(source: Any, name: str, default: int) -> int:
    """Return a whole number, `default` where there is none."""
    value = field_of(source, name)
    return value if isinstance(value, int) else default


def are_whole(values: Any) -> bool:
    """Whether `values` is a whole number, or lists of such, of lists and so on."""
    if isinstance(values, list | tuple):
        return all(map(are_whole, values))
    return type(values) is int


def text_of(source: Any, name: str) -> str:
    """Return a text, or the name of an enumeration's member; empty where there is neither."""
    value = field_of(source, name)
    if not isinstance(value, str):
        value = getattr(value, "name", "")
    # Some enumerations are texts whose `str` has the name of their class in it.
    return str.__str__(value) if isinstance(value, str) else ""


def canonical_text(source: Any, names: Iterable[str]) -> str:
    """Return the named fields that are set as one text, see `to_text`."""
    values = {name: field_of(source, name) for name in names}
    return to_text({name: value for name, value in values.items() if value is not None})


def to_text(value: Any) -> str:
    """Return `value` as JSON that is equal for equal values in every process."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    """Return `value` as JSON has it.

    Of an object that is no record only its type's name is kept: its own text may hold its
    address, which would give every process a namespace of its own.
    """
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, (Integral, Real)):
        return int(value) if isinstance(value, Integral) else float(value)  # numpy's
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(one) for one in value), key=json.dumps)
    names = _record_fields(value)
    if names is None:
        kind = value if isinstance(value, type) else type(value)
        return f"{kind.__module__}.{kind.__qualname__}"
    return {name: _plain(getattr(value, name, None)) for name in names}


def _record_fields(value: Any) -> list[str] | None:
    """Return the names of a record's fields; None for any other object."""
    declared = getattr(type(value), "model_fields", None)  # pydantic's
    if isinstance(declared, Mapping):
        return list(declared)
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return list(vars(value)) if isinstance(value, SimpleNamespace) else None
