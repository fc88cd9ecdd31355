"""What movers are asked for and answer: plain values that travel between processes."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Blocks of one part, one after the other in a chain, that one node has."""

    source: str
    """Name of the mover on the node that has them."""
    part: int
    keys: bytes
    """32 bytes each, in prefix order."""
    parent: bytes
    """Key before the first; empty at the root."""
    depth: int
    """Place of the first in its chain."""
    needs_parent: bool = True
    """Whether the blocks are of no use without their parent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOrder:
    """Blocks to bring into the arena of the mover that gets it; parents before their children."""

    spans: tuple[Span, ...]
    deadline_s: float
    """From the order's arrival on; what is not here by then is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """What a fetch got from one node."""

    num_blocks: int
    num_bytes: int
    seconds: float
    transport: str
    corrupt: int = 0
    """Blocks that arrived without their checksum."""
    error: str | None = None
    """Name of the class of `kvray.errors` that ended it early."""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchReport:
    """What became of a `FetchOrder`; nothing in it is an exception, for a miss is none."""

    here: tuple[int, ...]
    """For each span, how many of its leading blocks are READY here now."""
    sources: dict[str, SourceReport] = field(default_factory=dict)
    """By the name of the mover that was asked."""
