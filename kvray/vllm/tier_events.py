"""Which of an engine's blocks its node's memory has, as vLLM's own KV events of medium CPU.

vLLM asks after each pass, and publishes them with its own. A block that goes to disk is removed.
Told are blocks that this engine has saved or loaded, of which alone it knows tokens and hashes.
Source: `vllm/distributed/kv_events.py` and `BlockPool` of vLLM 0.29 and 0.32.
"""

import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core import kv_cache_utils

from kvray.engine.shared_state import SharedState
from kvray.identity.block import BlockKey
from kvray.store import Arena

_convert = kv_cache_utils.maybe_convert_block_hash
_untagged = getattr(kv_cache_utils, "to_event_extra_keys", list)
"""Returns extra keys as events have them; they are tagged in vLLM 0.32, and not in 0.29."""
_LOOK = 2048
"""Blocks that one call looks for, of those that were told and of those that were not yet."""
_UNTOLD_MAX = 65_536
_UNTOLD_S = 60.0
"""A block that is not readable after as long was not saved."""
_TOLD_MAX = 262_144
"""Blocks that are told at a time, of some 250 bytes each; of more, nothing is."""


class TierEvents:
    """Used by the thread of vLLM's scheduler."""

    def __init__(self, shared: SharedState, clock: Callable[[], float] = time.monotonic) -> None:
        self._shared = shared
        self._clock = clock
        self._untold: dict[Any, tuple[BlockKey, float, Any]] = {}
        """Block -> its key, when it is given up, and the event that tells of it."""
        self._told: dict[Any, BlockKey] = {}
        self._gone: list[Any] = []
        """Told blocks that are gone, until the next call takes them."""
        self._weights = shared.identity.weights
        self.pool: Any = None
        """vLLM's own blocks, once it has named them."""
        self._found: Any = None
        """Its table of them, of which a reset makes another one."""
        self._round: list[tuple[Any, BlockKey]] = []
        """Told blocks that are still to be looked for, because the arena has changed."""
        self._seen: tuple[str, int] | None = None
        """The arena, and its count of changes, when that round began."""

    def note(self, request: Any, keys: Sequence[BlockKey], first: int) -> None:
        """Tell of blocks of a request as soon as they are readable; `keys[0]` is block `first`."""
        self._follow()
        size, hashes = self._shared.args.tokens_per_block, request.block_hashes
        if len(hashes) > len(request.all_token_ids) // size:
            return  # vLLM hashes smaller blocks than it has
        until, lora = self._clock() + _UNTOLD_S, request.lora_request
        for place, key in enumerate(keys[: max(0, len(hashes) - first)], first):
            name, start, end = _convert(hashes[place]), place * size, (place + 1) * size
            is_full = len(self._untold) >= _UNTOLD_MAX or len(self._told) >= _TOLD_MAX
            if is_full or self._told.get(name) == key:
                continue
            extra, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, end, 0)
            event = BlockStored(
                block_hashes=[name],
                parent_block_hash=_convert(hashes[place - 1]) if place else None,
                token_ids=list(request.all_token_ids[start:end]),
                block_size=size,
                lora_id=None if lora is None else lora.adapter_id,
                medium=MEDIUM_CPU,
                lora_name=None if lora is None else lora.name,
                extra_keys=_untagged([extra]),
                group_idx=0,
            )
            self._untold[name] = key, until, event

    def take(self) -> list[Any]:
        """Return what has come and gone since the last call, as far as that was looked for."""
        self._follow()
        arena, stored = self._shared.link.arena, list[Any]()
        if arena is None:
            self._forget()
        else:
            self._look_for_told(arena)
            stored = self._stored(arena)
        gone, self._gone = self._gone, []
        if not gone:
            return stored
        return [BlockRemoved(block_hashes=gone, medium=MEDIUM_CPU, group_idx=0), *stored]

    def _follow(self) -> None:
        """Have nothing told after a reset, or of weights that are replaced: nobody can load it.

        For a reset vLLM tells everybody that all is cleared, these blocks too, and the connector
        nothing. They are told again when a request loads them.
        """
        found = getattr(self.pool, "cached_block_hash_to_block", None)
        if found is not self._found:
            self._found = found
            for each in (self._told, self._gone, self._round):
                each.clear()
        if self._weights != self._shared.identity.weights:
            self._weights = self._shared.identity.weights
            self._forget()

    def _forget(self) -> None:
        self._gone += self._told
        self._untold.clear()
        self._told.clear()
        self._round.clear()

    def _look_for_told(self, arena: Arena) -> None:
        now = arena.arena_id, arena.tables.counts.changes
        if not self._round and now != self._seen:
            self._round, self._seen = list(self._told.items()), now
        some = self._round[-_LOOK:]
        del self._round[-_LOOK:]
        here = self._are_here(arena, [key for _, key in some])
        for (name, key), is_here in zip(some, here, strict=True):
            if not is_here and self._told.get(name) == key:
                del self._told[name]
                self._gone.append(name)

    def _stored(self, arena: Arena) -> list[Any]:
        some, now, events = list(islice(self._untold.items(), _LOOK)), self._clock(), list[Any]()
        here = self._are_here(arena, [key for _, (key, *_) in some])
        for (name, (key, until, event)), is_here in zip(some, here, strict=True):
            del self._untold[name]
            if is_here:
                self._told[name] = key
                _append(events, event)
            elif now < until:
                self._untold[name] = key, until, event  # behind those that were not looked for
        return events

    def _are_here(self, arena: Arena, keys: list[BlockKey]) -> Any:
        """Return which blocks have all parts that the ranks read; without the arena's lock."""
        ranks = self._shared.identity.own.part_requests
        parts = sorted({one.part for requests in ranks for one in requests})
        return np.logical_and.reduce(arena.present(keys, parts)) if keys else ()


def _append(events: list[Any], event: Any) -> None:
    """Append an event of one block; blocks that follow one another have one together."""
    last = events[-1] if events else None
    if (
        last is not None
        and last.block_hashes[-1] == event.parent_block_hash
        and last.lora_id == event.lora_id
    ):
        last.block_hashes += event.block_hashes
        last.token_ids += event.token_ids
        last.extra_keys += event.extra_keys
    else:
        events.append(event)
