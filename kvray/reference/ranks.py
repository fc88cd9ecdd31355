"""The collectives among the ranks of one engine: over gloo between processes, or for one rank.

Every rank makes the same calls in the same order, from one thread at a time. Each call ends: with
an error on every rank if one of them has died or is late.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed

from kvray.errors import KVRayError

T = TypeVar("T")

# Its compiled classes have types in part only.
distributed: Any = torch.distributed


class CollectiveError(KVRayError):
    """A collective did not end; another rank has died, or is late."""


class SingleRank:
    """The only rank. It still pickles what others would receive, to prove that it can."""

    rank = 0
    size = 1

    def broadcast(self, value: T) -> T:
        return cast("T", _unpickle(pickle.dumps(value)))

    def allgather(self, value: T) -> list[T]:
        return [value]

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        return partial

    def meet(self, *, timeout_s: float) -> None:
        pass

    def leave(self) -> None:
        pass


class GlooRanks:
    """One rank's end of a process group on loopback; several engines fit into one process.

    Every method raises a CollectiveError if another rank has died, or is late.

    Args:
        rank: this one, from 0; 0 is the leader.
        size: how many there are.
        directory: empty; the ranks find each other there, and it may go once all have been made.
        timeout_s: the longest that one collective may take.
        diagnose: says why a collective failed, if anybody knows.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        directory: Path,
        *,
        timeout_s: float,
        diagnose: Callable[[], KVRayError | None] = lambda: None,
    ) -> None:
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        self._diagnose = diagnose
        self._group: Any = None
        with self._explained():
            # Made directly: `init_process_group` keeps one group per process, chooses the network
            # by the environment, and listens on every address.
            options = distributed.ProcessGroupGloo._Options()
            options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = timedelta(seconds=timeout_s)
            options._threads = 1
            store = distributed.FileStore(str(directory / "ranks"), -1)
            store.set_timeout(timedelta(seconds=timeout_s))
            self._group = distributed.ProcessGroupGloo(store, rank, size, options)
        # One rank may be connected with all while another still connects.
        self.meet(timeout_s=timeout_s)

    def broadcast(self, value: T) -> T:
        """Return the leader's value on every rank; the leader gets the object that it gave."""
        values = self.allgather(value if self.rank == 0 else None)
        return value if self.rank == 0 else cast("T", values[0])

    def allgather(self, value: T) -> list[T]:
        """Return a copy of every rank's value, in the order of the ranks."""
        data = pickle.dumps(value)
        longest = max(int(length) for length in self._allgather(torch.tensor([len(data)])))
        # The bytes that pad the shorter ones come after the pickle's own end.
        padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        return [cast("T", _unpickle(one.numpy().tobytes())) for one in self._allgather(padded)]

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum in the order of the ranks: the same bits everywhere and in every run.

        To gather and add costs a third of gloo's own ring for tensors of some KiB, and does not
        depend on how that cuts them.
        """
        total, *others = self._allgather(partial)
        for other in others:
            total += other
        return total

    def meet(self, *, timeout_s: float) -> None:
        options = distributed.BarrierOptions()
        options.timeout = timedelta(seconds=timeout_s)
        with self._explained():
            self._joined().barrier(options).wait()

    def leave(self) -> None:
        """Close the connections: ranks that wait for this one fail. Twice is fine."""
        self._group = None

    def _allgather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._explained():
            self._joined().allgather([gathered], [tensor]).wait()
        return gathered

    def _joined(self) -> Any:
        if self._group is None:
            raise CollectiveError(f"Rank {self.rank} has left the engine's ranks.")
        return self._group

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn gloo's errors into a sentence."""
        try:
            yield
        except RuntimeError as error:
            raise self._diagnose() or CollectiveError(
                f"Rank {self.rank} of {self.size} waited in vain for the others: one has died or "
                f"did nothing for {self._timeout_s:.0f} s. Restart the engine."
            ) from error


Ranks: TypeAlias = "SingleRank | GlooRanks"


def _unpickle(data: bytes) -> object:
    return pickle.loads(data)  # noqa: S301 (between an engine's own processes, as mpi4py does it)
