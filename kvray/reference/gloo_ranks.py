"""The collectives of `Ranks` between processes of one machine, over torch's gloo on loopback."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed

from kvray.errors import KVRayError

T = TypeVar("T")

# Its compiled classes have types in part only.
distributed: Any = torch.distributed

_FRAME_BYTES = 1024
"""What a collective of objects moves at first; only larger ones take a second round."""
_LENGTH_BYTES = 8
_ROOM_BYTES = _FRAME_BYTES - _LENGTH_BYTES


class CollectiveError(KVRayError):
    """A collective did not end; another rank has died, or is late."""


class GlooRanks:
    """One rank's end of a process group, which belongs to this object and not to the process.

    Args:
        rank: this one.
        size: how many there are.
        directory: an empty directory in which the ranks find each other; it may be removed when
            all of them have been made.
        timeout_s: the longest that one collective may take.
        diagnose: says, after a collective that failed, why, if anything is known of it.

    Raises:
        CollectiveError: not all ranks came in time.
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
        with self._failures_told():
            # Made directly: `init_process_group` keeps one group per process, chooses the network
            # by the environment, and listens on every address.
            options = distributed.ProcessGroupGloo._Options()
            options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = timedelta(seconds=timeout_s)
            options._threads = 1
            store = distributed.FileStore(str(directory / "ranks"), -1)
            store.set_timeout(timedelta(seconds=timeout_s))
            self._group = distributed.ProcessGroupGloo(store, rank, size, options)
        # A rank that is connected with all may be so before another is.
        self.meet(timeout_s=timeout_s)

    def broadcast(self, value: T) -> T:
        """Return the leader's value; the leader itself gets the object that it gave.

        Raises:
            CollectiveError: it did not end.
        """
        is_leader = self.rank == 0
        data = pickle.dumps(value) if is_leader else b""
        frame = _frame(data)
        self._broadcast(frame)
        rest = bytearray(data[_ROOM_BYTES:]) or bytearray(max(_length(frame) - _ROOM_BYTES, 0))
        if rest:
            self._broadcast(_as_tensor(rest))
        return value if is_leader else cast("T", _unpickle(frame, rest))

    def allgather(self, value: T) -> list[T]:
        """Return a copy of every rank's value, in the order of the ranks.

        Raises:
            CollectiveError: it did not end.
        """
        data = pickle.dumps(value)
        frames = self._allgather(_frame(data))
        rests = [b""] * self.size
        longest = max(_length(frame) for frame in frames) - _ROOM_BYTES
        if longest > 0:
            padded = bytearray(data[_ROOM_BYTES:].ljust(longest, b"\0"))
            rests = [rest.numpy().tobytes() for rest in self._allgather(_as_tensor(padded))]
        return [
            cast("T", _unpickle(frame, rest)) for frame, rest in zip(frames, rests, strict=True)
        ]

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum in the order of the ranks: the same bits everywhere.

        To gather and add costs a third of gloo's own ring for tensors of some KiB, and does not
        depend on how that cuts them.

        Raises:
            CollectiveError: it did not end.
        """
        total, *others = self._allgather(partial)
        for other in others:
            total += other
        return total

    def meet(self, *, timeout_s: float) -> None:
        """Wait until every rank is here.

        Raises:
            CollectiveError: one has died, or is not here in time.
        """
        options = distributed.BarrierOptions()
        options.timeout = timedelta(seconds=timeout_s)
        with self._failures_told():
            self._joined().barrier(options).wait()

    def leave(self) -> None:
        """Close the connections. Twice is fine."""
        self._group = None

    def _broadcast(self, tensor: torch.Tensor) -> None:
        with self._failures_told():
            self._joined().broadcast([tensor]).wait()

    def _allgather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._failures_told():
            self._joined().allgather([gathered], [tensor]).wait()
        return gathered

    def _joined(self) -> Any:
        if self._group is None:
            raise CollectiveError(f"Rank {self.rank} has left the engine's ranks.")
        return self._group

    @contextmanager
    def _failures_told(self) -> Iterator[None]:
        """Turn gloo's errors into a sentence."""
        try:
            yield
        except RuntimeError as error:
            raise self._diagnose() or CollectiveError(
                f"Rank {self.rank} of {self.size} waited in vain for the others: one has died or "
                f"did nothing for {self._timeout_s:.0f} s. Start the engine anew."
            ) from error


def _frame(data: bytes) -> torch.Tensor:
    """Return the length of `data` and its beginning, in a tensor of `_FRAME_BYTES`."""
    head = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:_ROOM_BYTES]
    return _as_tensor(bytearray(head.ljust(_FRAME_BYTES, b"\0")))


def _length(frame: torch.Tensor) -> int:
    return int.from_bytes(frame[:_LENGTH_BYTES].numpy().tobytes(), "little")


def _unpickle(frame: torch.Tensor, rest: Sequence[int]) -> object:
    data = frame[_LENGTH_BYTES:].numpy().tobytes() + bytes(rest)
    return pickle.loads(data)  # noqa: S301 (between an engine's own processes, as mpi4py does it)


def _as_tensor(data: bytearray) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)
