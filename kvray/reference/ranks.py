"""What the ranks of one engine do together, and the one rank that does it alone."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Ranks(Protocol):
    """The collectives among the ranks of one engine.

    Every rank makes the same calls in the same order, from one thread at a time. Each call ends:
    with an error on every rank if one of them has died or is late.
    """

    @property
    def rank(self) -> int:
        """This one, from 0; 0 is the leader."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def broadcast(self, value: T) -> T:
        """Return the leader's value on every rank; what others give is not looked at."""
        ...

    def allgather(self, value: T) -> list[T]:
        """Return every rank's value, in the order of the ranks."""
        ...

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' tensors, the same bits on each rank and in every run."""
        ...

    def meet(self, *, timeout_s: float) -> None:
        """Wait until every rank is here."""
        ...

    def leave(self) -> None:
        """Take part no longer: whoever waits for this rank fails. Twice is fine."""
        ...


class SingleRank:
    """One rank, which still pickles what others would receive, so that it is known to pickle."""

    rank = 0
    size = 1

    def broadcast(self, value: T) -> T:
        """Return a pickled and unpickled copy."""
        copy: T = pickle.loads(pickle.dumps(value))  # noqa: S301 (our own bytes, made in place)
        return copy

    def allgather(self, value: T) -> list[T]:
        """Return the one value there is."""
        return [value]

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the whole, which the part of the only rank is."""
        return partial

    def meet(self, *, timeout_s: float) -> None:
        """Nobody to wait for."""

    def leave(self) -> None:
        """Nobody waits."""
