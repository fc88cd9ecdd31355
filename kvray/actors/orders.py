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


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What one mover asks another for: blocks to be leased, and ways to bring them."""

    groups: tuple[tuple[int, bytes], ...]
    """Part, and keys of 32 bytes each in prefix order."""
    lease_s: float
    """How long the blocks are kept for who asks; each `SendOrder` begins that anew."""
    addresses: dict[str, bytes]
    """Of the asker's transports, the best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedGroup:
    """The leading blocks of a group that are there, leased."""

    sizes: bytes
    """Bytes of each block, u64."""
    checksums: bytes
    """As recorded when they were stored, u64."""
    namespaces: bytes = b""
    """Whose they are, u32, see `block.namespace_id`; empty: not known."""
    priorities: bytes = b""
    """Retention priorities, u8; empty: the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What one mover has for another, until its lease ends."""

    token: int
    transport: str
    groups: tuple[OfferedGroup, ...]
    """As in the `Want`; each as long as there is something of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOrder:
    """A piece to be moved: blocks of an offer, and where each goes in the asker's memory."""

    token: int
    blocks: bytes
    """Places among all offered blocks, group after group, u32."""
    targets: bytes
    """Offsets, u64."""
    timeout_s: float
