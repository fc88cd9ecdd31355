"""Where a prompt's blocks are, as lookup and shards say it to a router; pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from kvray.identity.block import BlockKey
from kvray.index import Run
from kvray.routing.cost import Link, Medium, Stretch

_WORD_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a shard says of a replica that is registered there, and of its node."""

    tokens_per_block: int
    block_bytes: int
    """Of a block that the replica's ranks read there."""
    parts: int
    """Mask of the parts that make a block whole for them."""
    namespace: bytes
    """Digest of its namespace; empty: only a shard can make the keys of its prompts."""
    num_partitions: int
    """Of the lookup."""
    disk: Link | None = None
    """None: the node has none."""
    links: Mapping[str, Link] = field(default_factory=dict)
    """Shard -> how fast it gives blocks to this node, as measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Where a prompt's blocks are."""

    tokens_per_block: int
    token_bytes: float
    words: tuple[bytes, ...]
    """The first 8 bytes of the key of each full block."""
    stretches: tuple[Stretch, ...]

    def is_in_memory_of(self, node: str) -> bool:
        """Return whether a node has in memory all that anybody has of the prompt."""
        return all(stretch.holders.get(node) == "host" for stretch in self.stretches)


def survey_of(
    profile: Profile, keys: Sequence[BlockKey], runs: Sequence[Run], on_disk: Mapping[str, bytes]
) -> Survey:
    """Return what is known of a prompt with `keys`.

    Args:
        profile: of a replica that it may go to.
        keys: of its full blocks.
        runs: as the lookup's `locate` gives them.
        on_disk: of shards with a disk, one byte a block: 1 if it has it there only.
    """
    return Survey(
        tokens_per_block=profile.tokens_per_block,
        token_bytes=profile.block_bytes / profile.tokens_per_block,
        words=tuple(key[:_WORD_BYTES] for key in keys),
        stretches=tuple(_stretches(profile, runs, on_disk)),
    )


def _stretches(
    profile: Profile, runs: Sequence[Run], on_disk: Mapping[str, bytes]
) -> Iterable[Stretch]:
    """Yield the leading blocks without a gap, by who holds them and where."""
    start = 0
    for run in runs:
        whole = [name for name, has in run.holders.items() if has & profile.parts == profile.parts]
        if not whole:
            return
        disks = [name for name in whole if name in on_disk]
        parts: Iterable[tuple[tuple[int, ...], int]] = [((), run.stop - start)]
        if disks:
            media = (tuple(on_disk[name][at] for name in disks) for at in range(start, run.stop))
            parts = ((same, len([*blocks])) for same, blocks in groupby(media))
        for same, count in parts:
            away = {name for name, is_away in zip(disks, same, strict=False) if is_away}
            holders: dict[str, Medium] = {
                name: "disk" if name in away else "host" for name in whole
            }
            yield Stretch(num_tokens=count * profile.tokens_per_block, holders=holders)
        start = run.stop
