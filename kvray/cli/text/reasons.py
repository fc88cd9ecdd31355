"""Words for each reason of a miss and each cause of an eviction, and what to do about it."""

from typing import NamedTuple


class Reason(NamedTuple):
    """One reason of a miss."""

    means: str
    """The end of a sentence "missed because ..."."""
    advice: str
    """What to do, as a sentence; empty if nothing."""


REASONS: dict[str, Reason] = {
    "none": Reason("nothing was missed", ""),
    "never_stored": Reason(
        "no replica of this namespace has stored these blocks",
        "Nothing is wrong if the text is new. If it was sent before, see in `kvray status` whether"
        " namespaces differ, and compare the token ids of both"
        " prompts: after the first token that differs (a date, a name), nothing can match.",
    ),
    "evicted": Reason("they were stored, and had left the tier", ""),
    "partial": Reason(
        "some ranks' parts of these blocks are stored, and others are not",
        "A rank could not save, or its node is gone: see `dropped` and gone ranks in `kvray"
        " status`.",
    ),
    "not_stored": Reason(
        "no node had these blocks", "Run `kvray explain` to see what became of them."
    ),
    "corrupt": Reason(
        "a block failed its checksum and was not used",
        "Run `kvray verify`; if it finds more, look at the memory and the disk of that node.",
    ),
    "arena_busy": Reason(
        "another process held the lock of the node's memory for longer than arena.lock_wait_s",
        "If it happens often, look for processes that are starved of CPU, or raise"
        " arena.lock_wait_s.",
    ),
    "too_slow": Reason(
        "the blocks were elsewhere and did not arrive within connector.stage_wait_s; the next"
        " request finds them",
        "Use Client.prefetch in the router, or raise connector.stage_wait_s; `kvray status` shows"
        " how fast blocks arrive.",
    ),
    "cheaper_to_recompute": Reason(
        "fetching the blocks would have taken longer than computing them",
        "If the network should be faster, run `kvray doctor`.",
    ),
    "store_down": Reason(
        "the node's shard, or the lookup, did not answer, or there is no tier on the node",
        "See `kvray status`, and `kvray doctor` on the engine's node.",
    ),
    "unaligned": Reason(
        "the engine had part of a block itself, and kvray has only whole blocks",
        "Set kv_cache_config.enable_partial_reuse: false.",
    ),
    "fingerprinting": Reason(
        "the engine was still reading its checkpoint, which its namespace depends on",
        "Wait; `kvray status` and the engine's log show the progress. To use the tier at once, name"
        " model and revision in connector.model_key.",
    ),
    "weights_unnamed": Reason(
        "the engine's weights were replaced, or may be, and nobody has named their version",
        "Call Client.set_weights_version once the new weights are loaded, or set"
        " connector.weights_version for those that the engine starts with.",
    ),
    "reuse_disabled": Reason(
        "block reuse is off in the engine: kv_cache_config.enable_block_reuse is false",
        "Set kv_cache_config.enable_block_reuse: true.",
    ),
    "skipped": Reason(
        "the request reads no prefix cache, as one that wants logprobs of its prompt",
        "Ask for no logprobs of a prompt where a hit is worth more.",
    ),
    "bypassed": Reason(
        "the request has no keys: it names no tenant, or an adapter or item without an identity",
        "See the warnings in the engine's log.",
    ),
}

_MORE_ROOM = (
    "Raise arena.capacity, or give the tier a disk (nvme.dir); `kvray replay` shows what more"
    " memory would gain."
)
CAUSES = {
    "writer": Reason("a writer of that node, because the memory was full", _MORE_ROOM),
    "ahead": Reason("the shard, to keep arena.free_target free", _MORE_ROOM),
    "quota": Reason(
        "the shard, because the namespace was over its quota",
        "Raise its quota (arena.namespace_quota, arena.quotas).",
    ),
    "given_up": Reason(
        "the shard, because other parts of the block were gone",
        "Look at the node that had them: `kvray status`.",
    ),
    "cleared": Reason("a user who cleared the tier", "It fills again by itself."),
    "corrupt": Reason(
        "a reader, because the block failed its checksum",
        "Run `kvray verify`; if it finds more, look at the memory and the disk of that node.",
    ),
    "disk_room": Reason("the shard, to make room on its disk", "Raise nvme.capacity."),
}
"""Who evicted a block, and why."""

WAYS = {
    "host": "in the node's memory already",
    "nvme": "brought from the node's disk",
    "nixl": "brought over NIXL",
    "object_ref": "brought through Ray's object store",
}


def reason(name: str, cause: str = "") -> Reason:
    """Return the words for a reason; an unknown one is its own name.

    The advice on evicted blocks depends on the `cause`, one of `CAUSES`.
    """
    known = REASONS.get(name) or Reason(name.replace("_", " "), "")
    return known._replace(advice=CAUSES[cause].advice) if cause in CAUSES else known
