"""Why tokens hit or missed and blocks left, in words, and what can be done about it."""

from typing import NamedTuple

MISS_PREFIX = "miss_tokens_"
"""What counters of missed tokens begin with; the reason follows."""


class Reason(NamedTuple):
    """One reason of a miss."""

    means: str
    """What was the case, as the end of "missed: ..."."""
    advice: str
    """What to do, as a sentence; empty: nothing."""


REASONS = {
    "none": Reason("nothing was missed", ""),
    "never_stored": Reason(
        "no replica of this namespace has stored these blocks",
        "Nothing is wrong if the text is new. If it was sent before, compare the token ids of both"
        " prompts: one that differs early (a date, a name, a template) makes all after it differ.",
    ),
    "evicted": Reason("they were stored, and had left the tier", ""),
    "partial": Reason(
        "some ranks' parts of these blocks are stored, and others are not",
        "A rank could not save, or its node is gone: see `dropped` and gone ranks in `kvray"
        " status`.",
    ),
    "incompatible": Reason(
        "such text is stored by a replica of another namespace only, whose bytes are others",
        "Start both replicas with the same model and engine arguments; if the difference is meant,"
        " nothing has to be done.",
    ),
    "not_stored": Reason(
        "no node had these blocks", "See `kvray explain` for what became of them."
    ),
    "corrupt": Reason(
        "a block did not have its checksum, so it was not used",
        "Run `kvray verify`; if it finds more, look at the memory and the disk of that node.",
    ),
    "arena_busy": Reason(
        "another process held the lock of the node's memory for longer than arena.lock_wait_s",
        "If it happens often, look for processes that are starved of CPU, or raise"
        " arena.lock_wait_s.",
    ),
    "too_slow": Reason(
        "the blocks were elsewhere and did not come within connector.stage_wait_s; they go on"
        " coming for the next request",
        "Use Client.prefetch in the router, or raise connector.stage_wait_s; `kvray status` shows"
        " how fast blocks come.",
    ),
    "cheaper_to_recompute": Reason(
        "bringing the blocks would have taken longer than computing them",
        "Nothing, unless the way between the nodes should be faster: see `kvray doctor`.",
    ),
    "store_down": Reason(
        "the node's shard, or the lookup, did not answer, or there is no tier on the node",
        "See `kvray status`, and `kvray doctor` on the engine's node.",
    ),
    "unaligned": Reason(
        "the engine had a part of a block of its own, and kvray has whole blocks only",
        "Set kv_cache_config.enable_partial_reuse: false.",
    ),
    "reuse_disabled": Reason(
        "the engine takes no blocks: kv_cache_config.enable_block_reuse is false",
        "Set kv_cache_config.enable_block_reuse: true.",
    ),
    "bypassed": Reason(
        "the request has no keys: it names no tenant, or an adapter or an item that cannot be told"
        " from others",
        "See the warnings in the engine's log.",
    ),
}

COUNTED = REASONS.keys() - {"none", "never_stored", "evicted", "partial", "bypassed"}
"""Reasons by which engines count missed tokens; the others only `kvray explain` tells apart."""

_MORE_ROOM = (
    "Raise arena.capacity, or give the tier a disk (nvme.dir); `kvray replay` says how much more"
    " memory would find."
)
CAUSES = {
    "writer": Reason("a writer of that node that found the memory full", _MORE_ROOM),
    "ahead": Reason("the shard, to keep arena.free_target free", _MORE_ROOM),
    "quota": Reason(
        "the shard, because the namespace was over its quota",
        "Raise its quota (arena.namespace_quota, arena.quotas).",
    ),
    "spare": Reason("the shard, because another node kept the block too", _MORE_ROOM),
    "given_up": Reason(
        "the shard, because other parts of the block were gone",
        "Look at the node that had them: `kvray status`.",
    ),
    "cleared": Reason("somebody who cleared the tier", "It fills again by itself."),
    "corrupt": Reason(
        "a reader who found that the bytes were wrong",
        "Run `kvray verify`; if it finds more, look at the memory and the disk of that node.",
    ),
    "disk_room": Reason("the shard, to make room on its disk", "Raise nvme.capacity."),
}
"""By whom and why a block left."""

WAYS = {
    "host": "in the node's memory already",
    "nvme": "brought from the node's disk",
    "nixl": "brought over NIXL",
    "object_ref": "brought through Ray's object store",
}


def reason(name: str, cause: str = "") -> Reason:
    """Return what is known of a reason; of one that an engine made up, its name.

    Args:
        name: of the reason.
        cause: of `CAUSES`, if blocks have left: what to do depends on it.
    """
    known = REASONS.get(name) or Reason(name.replace("_", " "), "")
    return known._replace(advice=CAUSES[cause].advice) if cause in CAUSES else known
