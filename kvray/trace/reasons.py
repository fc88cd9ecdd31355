"""The reasons that kvray gives: why tokens were missed, why computed blocks are not saved; pure.

They end the names of counters (`miss_tokens_<reason>`, `dropped_blocks_<reason>`) and are labels of
metrics. Code that names a reason has one of these types, so that mypy finds a misspelled one.
"""

from enum import Enum
from typing import Literal, get_args

StageReason = Literal[
    "store_down", "too_slow", "corrupt", "cheaper_to_recompute", "not_stored", "none"
]
"""Why a shard did not bring all of a prefix; `none`: it did. The first of them outweighs the rest
where ranks have several."""

EngineReason = Literal[
    "arena_busy",
    "fingerprinting",
    "hold_full",
    "reuse_disabled",
    "skipped",
    "unaligned",
    "weights_unnamed",
]
"""Further reasons by which engines count missed tokens."""

HistoryReason = Literal["never_stored", "evicted", "partial", "bypassed"]
"""Reasons that only `kvray explain` tells apart."""

MissReason = StageReason | EngineReason | HistoryReason

STAGE_REASONS: tuple[StageReason, ...] = get_args(StageReason)
COUNTED: frozenset[str] = frozenset((*STAGE_REASONS, *get_args(EngineReason))) - {"none"}
"""Reasons by which engines count missed tokens."""
MISS_REASONS: frozenset[str] = COUNTED | {"none", *get_args(HistoryReason)}

MISS_PREFIX = "miss_tokens_"
DROP_PREFIX = "dropped_blocks_"


class DropReason(str, Enum):
    """Why a computed block is not saved."""

    STORE_DOWN = "store_down"
    ARENA_BUSY = "arena_busy"
    NO_ROOM = "no_room"
    TOO_MANY = "too_many"
    TOO_SLOW = "too_slow"
    SHUT_DOWN = "shut_down"
    NO_PAGE = "no_page"
    NO_POOL = "no_pool"
    VOID = "void"
    UNWRITTEN = "unwritten"
    NEW_WEIGHTS = "new_weights"
    NOT_SHOWN = "not_shown"
    ERROR = "error"
