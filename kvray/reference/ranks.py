"""The collectives among the ranks of one engine: the leader gathers over pipes, and answers.

Every rank makes the same calls in the same order, from one thread at a time. Each call ends: with
an error on every rank if one of them has died or is late.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast

import torch

from kvray.errors import ConfigError, KVRayError
from kvray.reference.child_process import Pipe, PipeClosed, spawn_child
from kvray.reference.engine_options import EngineOptions

T = TypeVar("T")

_MODULE = "kvray.reference.rank_process"
_STDERR = 2
_TASK_TIMEOUT_S = 30.0
_IMPORT_TIMEOUT_S = 120.0
_DIAGNOSIS_S = 2.0
_CLOSE_TIMEOUT_S = 20.0
_FAILED_TIMEOUT_S = 2.0


class CollectiveError(KVRayError):
    """A collective did not end; another rank has died, or is late."""


class Follower:
    """A rank from 1 on: it sends its values to the leader, and takes what that makes of all.

    Every method raises a CollectiveError if the leader has ended, or is late.
    """

    def __init__(self, rank: int, size: int, leader: Pipe, *, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._leader = leader
        self._timeout_s = timeout_s

    def broadcast(self, _value: T) -> T:
        """Return a copy of the leader's value."""
        return cast("T", self._exchange(None, self._timeout_s))

    def allgather(self, value: T) -> list[T]:
        """Return a copy of every rank's value, in the order of the ranks."""
        return cast("list[T]", self._exchange(value, self._timeout_s))

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum in the order of the ranks: the same bits everywhere and in every run."""
        return torch.from_numpy(self._exchange(partial.numpy(), self._timeout_s))

    def meet(self, *, timeout_s: float) -> None:
        """Wait until all ranks have come here."""
        self._exchange(None, timeout_s)

    def leave(self) -> None:
        """Wait for nobody more; `fail` or the end of the process tells the leader."""

    def fail(self, error: BaseException) -> None:
        """Send the leader, in place of a value, why this rank ends."""
        sentence = str(error) if isinstance(error, KVRayError) else repr(error)
        print(f"kvray: rank {self.rank} ends: {sentence}", file=sys.stderr, flush=True)
        failure = _Failure(sentence, is_config=isinstance(error, ConfigError))
        with contextlib.suppress(PipeClosed):  # it may be the leader that has ended
            self._leader.send(failure, timeout_s=_FAILED_TIMEOUT_S)

    def _exchange(self, value: object, timeout_s: float) -> Any:
        try:
            self._leader.send(value, timeout_s=timeout_s)
            return self._leader.receive(timeout_s=timeout_s)
        except PipeClosed as error:
            raise CollectiveError(
                f"Rank {self.rank} waited in vain for the leader: {error} Restart the engine."
            ) from error


def start_ranks(options: EngineOptions) -> Leader:
    """Start the processes of the ranks besides this one; return when they are about to load."""
    others: list[Other] = []
    leader = Leader(others, timeout_s=options.collective_timeout_s)
    try:
        for rank in range(1, options.tensor_parallel_size):
            env = options.rank_env[rank - 1] if options.rank_env else {}
            others.append(Other(rank, *spawn_child(_MODULE, output=_STDERR, env=env)))
        for other in others:
            other.send((other.rank, sys.path, options), _TASK_TIMEOUT_S)
        leader.meet(timeout_s=_IMPORT_TIMEOUT_S)
    except BaseException:
        leader.kill()
        raise
    return leader


class Leader:
    """Rank 0, which has started the processes of the others, if there are any.

    The others never outlive this process, and print to its stderr. The methods are those of
    `Follower`. They raise a KVRayError that says which rank has died, and of what, or a
    CollectiveError if one is late.
    """

    rank = 0

    def __init__(self, others: Sequence[Other] = (), *, timeout_s: float = 0.0) -> None:
        """`timeout_s` is the longest that one collective waits for each rank."""
        self._others = others
        self._timeout_s = timeout_s

    @property
    def size(self) -> int:
        return 1 + len(self._others)

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the other ranks, from rank 1 on."""
        return tuple(other.pid for other in self._others)

    def broadcast(self, value: T) -> T:
        self._gather(self._timeout_s)
        self._answer(value, self._timeout_s)
        return value

    def allgather(self, value: T) -> list[T]:
        values = [value, *self._gather(self._timeout_s)]
        self._answer(values, self._timeout_s)
        return values

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        if not self._others:
            return partial  # which may be a GPU's; ranks are of the CPU
        total = partial.numpy()
        for other in self._gather(self._timeout_s):
            total = total + other
        self._answer(total, self._timeout_s)
        return torch.from_numpy(total)

    def meet(self, *, timeout_s: float) -> None:
        self._gather(timeout_s)
        self._answer(None, timeout_s)

    def leave(self) -> None:
        """Close the pipes: ranks that wait for this one fail. Twice is fine."""
        for other in self._others:
            other.pipe.close()

    def close(self, *, has_failed: bool) -> None:
        """Wait until the ranks have ended, then kill those that have not. Twice is fine."""
        # After a failure one of them may hang: waiting longer would not help.
        deadline = time.monotonic() + (_FAILED_TIMEOUT_S if has_failed else _CLOSE_TIMEOUT_S)
        for other in self._others:
            other.wait(deadline - time.monotonic())
        self.kill()

    def kill(self) -> None:
        """End the ranks at once. Twice is fine."""
        for other in self._others:
            other.kill()

    def _gather(self, timeout_s: float) -> list[Any]:
        """Receive from all before anybody is answered: so each end waits for the other in turn."""
        return [other.receive(timeout_s) for other in self._others]

    def _answer(self, value: object, timeout_s: float) -> None:
        for other in self._others:
            other.send(value, timeout_s)


class Other:
    """Another rank's process, as the leader sees it."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], pipe: Pipe) -> None:
        self.rank = rank
        self.pid = process.pid
        self.pipe = pipe
        self._process = process
        self._name = f"Rank {rank} (pid {process.pid})"

    def send(self, value: object, timeout_s: float) -> None:
        try:
            self.pipe.send(value, timeout_s=timeout_s)
        except PipeClosed as error:
            raise self._cause(error) from error

    def receive(self, timeout_s: float) -> Any:
        try:
            value = self.pipe.receive(timeout_s=timeout_s)
        except PipeClosed as error:
            raise self._cause(error) from error
        if isinstance(value, _Failure):
            kind = ConfigError if value.is_config else KVRayError
            raise kind(f"{self._name} failed: {value.sentence}")
        return value

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit status, or None if there is none in time."""
        try:
            return self._process.wait(max(timeout_s, 0.0))
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.pipe.close()

    def _cause(self, error: PipeClosed) -> KVRayError:
        code = self.wait(_DIAGNOSIS_S)
        if code is None:
            return CollectiveError(
                f"{self._name} was waited for in vain: {error} Restart the engine."
            )
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited: {code}"
        return KVRayError(f"{self._name} {end}. Restart the engine.")


@dataclass(frozen=True, slots=True)
class _Failure:
    """What a rank sends in place of a value when it ends."""

    sentence: str
    is_config: bool


Ranks: TypeAlias = "Leader | Follower"
