"""Where a prompt's blocks are, as a shard says it to a router; pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvray.routing.cost import Link, Medium, Stretch

_BYTES_PER_S = 2e9
"""Of another node that has given nothing yet; a guess, until it has."""
_WORD_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Where a prompt's blocks are."""

    tokens_per_block: int
    token_bytes: float
    words: tuple[bytes, ...]
    """The first 8 bytes of the key of each full block."""
    stretches: tuple[Stretch, ...]
    links: Mapping[str, Link]
    """Shard -> how fast it gives, as measured by one of the others."""
    prefix_digest: bytes = b""
    """See `kvray.trace.prefix_digest`; empty: not known."""

    def is_in_memory_of(self, node: str) -> bool:
        """Return whether a node has in memory all that anybody has of the prompt."""
        return all(stretch.holders.get(node) == "host" for stretch in self.stretches)


def read_survey(found: Mapping[str, Any]) -> Survey:
    """Return what `ActorRequests.survey` said."""
    own, words, size = found["shard"], found["words"], found["tokens_per_block"]
    stretches, before = [], 0
    for (stop, holders), is_on_disk in zip(found["runs"], found["on_disk"], strict=True):
        media: dict[str, Medium] = {
            name: "disk" if name == own and is_on_disk else "host" for name in holders
        }
        stretches.append(Stretch(num_tokens=(stop - before) * size, holders=media))
        before = stop
    return Survey(
        tokens_per_block=size,
        token_bytes=found["block_bytes"] / size,
        words=tuple(words[at : at + _WORD_BYTES] for at in range(0, len(words), _WORD_BYTES)),
        stretches=tuple(stretches),
        links={
            name: Link(latency_s=latency_s, bytes_per_s=bytes_per_s or _BYTES_PER_S)
            for name, (latency_s, bytes_per_s) in found["links"].items()
        },
        prefix_digest=found.get("prefix_digest", b""),  # an older shard says none
    )
