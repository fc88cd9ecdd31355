"""Orders to movers and their answers: plain values that travel between processes."""

from dataclasses import dataclass, field
from typing import Any, Literal

from kvray.errors import KVRayError
from kvray.store.arena.tables import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive blocks of one part that one node has."""

    source: str
    """Name of the mover on the node that has them."""
    part: int
    keys: bytes
    """32 bytes each, in prefix order."""
    parent: bytes
    """Key before the first; empty at the root."""
    depth: int
    """Place of the first in its prompt."""
    head: int = 0
    """Number of the chain, see `block.head_number`; 0: not known."""
    needs_parent: bool = True
    """Whether the blocks are useless without their parent."""
    block_bytes: int = 0
    """Bytes that a block should have; 0: not known."""
    namespace: int = 0
    """Namespace that the blocks should have, see `block.namespace_id`; 0: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOrder:
    """Blocks that a mover fetches into its arena; parents before their children."""

    spans: tuple[Span, ...]
    deadline_s: float
    """Counted from the order's arrival; the mover gives up what is late."""
    purpose: Literal["prompt", "copy", "use"] = "prompt"
    """What the policies are to make of it: a prompt uses the blocks at their source, a copy does
    not, and a use is a copy that has been used: it counts here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """The result of a fetch from one node."""

    num_blocks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    transport: str = ""
    corrupt: int = 0
    """Blocks that arrived without their checksum."""
    error: str | None = None
    """Name of the `kvray.errors` class that ended it early."""
    message: str = ""

    @classmethod
    def of(cls, error: KVRayError | None, **figures: Any) -> "SourceReport":
        """Return the report of a fetch that `error` has ended early, if it is one."""
        if error is None:
            return cls(**figures)
        return cls(error=type(error).__name__, message=str(error), **figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchReport:
    """The result of a `FetchOrder`; a miss is a value in it, never an exception."""

    here: tuple[int, ...]
    """For each span, the number of its leading blocks that are READY here."""
    sources: dict[str, SourceReport] = field(default_factory=dict)
    """By the name of the source's mover."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGroup:
    """Blocks of one part in prefix order, and where those go that are sent with the lease."""

    part: int
    keys: bytes
    """32 bytes each."""
    block_bytes: int = 0
    namespace: int = 0
    """What the asker has reserved slots for; blocks of other kinds are leased only."""
    targets: bytes = b""
    """Offset in the asker's memory of each of the first blocks, i64; -1: it is not to be sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """Blocks that one mover asks another to lease for reading, and where to send them."""

    groups: tuple[LeaseGroup, ...]
    lease_s: float
    """How long the lease holds; each `SendOrder` renews it."""
    addresses: dict[str, bytes]
    """Address of each transport of the asker, the best first, by which the `targets` are meant."""
    timeout_s: float
    """For what is sent with the lease."""
    is_use: bool = True
    """Whether the lease counts as a use of the blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedGroup:
    """The leading blocks of a group that the source has, leased; one row each."""

    sizes: Array
    """Bytes of each block, i64."""
    checksums: Array
    """As recorded when they were stored, u64."""
    namespaces: Array
    """The namespace of each block, u32, see `block.namespace_id`."""
    priorities: Array
    """Retention priorities, u8."""
    was_sent: bool
    """Whether those that have targets were sent with the lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLease:
    """The blocks that one mover has leased for another, until release or expiry."""

    token: int
    """0: it has ended, as all that it leased was sent with it."""
    transport: str
    groups: tuple[LeasedGroup, ...]
    """One for each requested group; it ends at the first block that the source lacks."""
    parcel: Any = None
    """What was sent with it, for `Transport.receive`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOrder:
    """A piece to send: blocks of a read lease, and where each goes in the asker's memory."""

    token: int
    blocks: bytes
    """Places among all leased blocks, group after group, u32."""
    targets: bytes
    """Offsets, u64."""
    timeout_s: float
