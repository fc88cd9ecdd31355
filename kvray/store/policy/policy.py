"""What decides which blocks of a tier go first; `kvray replay` says how well each decides."""

from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

Array = npt.NDArray[Any]


class Use(NamedTuple):
    """Consecutive blocks of one prompt that were found in a tier, or stored there."""

    slots: Array
    """Where they are, in prefix order."""
    names: Array
    """The first 8 bytes of each one's key, i64: what is known of blocks that are not there."""
    depth: int
    """Place of the first of them in the prompt."""
    length: int
    """Blocks of the prompt, as far as is known."""
    now: float
    """Seconds, on any clock that goes on."""
    parent: int = -1
    """Slot of the block before the first one; -1: it is the prompt's first."""
    request: int | None = None
    """What the same request's other blocks are known by, if that is known."""


class Policy(Protocol):
    """Ranks the blocks of one tier. Single-threaded, no clock, no I/O.

    It knows slots by their numbers, and need not look after families: that a parent goes after its
    children is for the caller to see to.
    """

    keeps_order: bool
    """Whether blocks stay in their order until they are used, however late it is."""

    def used(self, use: Use) -> None:
        """Note that a prompt found these blocks in the tier: its leading ones."""

    def stored(self, use: Use) -> None:
        """Note that these blocks of a prompt are in the tier from now on."""

    def freed(self, slots: Array) -> None:
        """Note that the blocks in these slots have left the tier."""

    def answered(self, request: int, num_tokens: int) -> None:
        """Note that a request, which was named in a `Use`, has ended with so many tokens."""

    def copied(self, slots: Array, source: Any, theirs: Array) -> None:
        """Take over what the policy of another tier knows of blocks that are in this one as well.

        Args:
            slots: where they are here.
            source: the policy that `beside` made this one, or the other way round.
            theirs: where they are there.
        """

    def beside(self, num_slots: int) -> "Policy":
        """Return a policy for another tier of the same prompts."""

    def rank(self, slots: Array, *, now: float) -> Array:
        """Return a number for each of `slots`, f8: the lowest is to go first.

        Args:
            slots: with blocks in them.
            now: seconds, on the clock of `Use.now`.
        """
