"""The collectives among the ranks of one engine: the leader gathers over pipes, and answers.

Every rank makes the same calls in the same order, from one thread at a time. Each call ends: with
an error on every rank if one of them has died or is late.
"""

import contextlib
import functools
import operator
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

from kvray.errors import KVRayError
from kvray.reference.child_process import Child, Pipe, PipeClosed
from kvray.reference.engine_options import EngineOptions

T = TypeVar("T")

_MODULE = "kvray.reference.engine"
_STDERR = 2
_TASK_TIMEOUT_S = 30.0
_CLOSE_TIMEOUT_S = 20.0
_FAILED_TIMEOUT_S = 2.0
_ADVICE = "Restart the engine."


class Ranks:
    """One rank, and its way to the others; the leader, rank 0, has started their processes.

    These never outlive the leader, and print to its stderr. A collective raises a KVRayError that
    says which rank has died, and of what, or that one is late.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        children: Sequence[Child] = (),
        leader: Pipe | None = None,
        timeout_s: float = 0.0,
    ) -> None:
        """Be the leader of `children`, or have a `leader`; each wait for a rank is `timeout_s`."""
        self.rank = rank
        self.size = size
        self._children = children
        self._leader = leader
        self._timeout_s = timeout_s

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the other ranks, from rank 1 on, as the leader knows them."""
        return tuple(child.process.pid for child in self._children)

    def broadcast(self, value: T) -> T:
        """Return the leader's value, of which the others get a copy."""
        return cast("T", self._exchange(value, lambda values: values[0], self._timeout_s))

    def allgather(self, value: T) -> list[T]:
        """Return every rank's value, in the order of the ranks."""
        return cast("list[T]", self._exchange(value, list, self._timeout_s))

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum in the order of the ranks: the same bits everywhere and in every run."""
        if self.size == 1:
            return partial  # which may be a GPU's; ranks are of the CPU
        add = functools.partial(functools.reduce, operator.add)
        return torch.from_numpy(self._exchange(partial.numpy(), add, self._timeout_s))

    def meet(self, *, timeout_s: float) -> None:
        """Wait until all ranks have come here."""
        self._exchange(None, lambda _: None, timeout_s)

    def leave(self) -> None:
        """Close the leader's pipes: ranks that wait for it fail. Twice is fine."""
        for child in self._children:
            child.pipe.close()

    def fail(self, error: BaseException) -> None:
        """Send the leader, in place of a value, why this rank ends."""
        told = error if isinstance(error, KVRayError) else KVRayError(repr(error))
        print(f"kvray: rank {self.rank} ends: {told}", file=sys.stderr, flush=True)
        if self._leader is not None:
            with contextlib.suppress(PipeClosed):  # it may be the leader that has ended
                self._leader.send(told, timeout_s=_FAILED_TIMEOUT_S)

    def close(self, *, has_failed: bool) -> None:
        """Wait until the other ranks have ended, then kill those that have not. Twice is fine."""
        # After a failure one of them may hang: waiting longer would not help.
        deadline = time.monotonic() + (_FAILED_TIMEOUT_S if has_failed else _CLOSE_TIMEOUT_S)
        for child in self._children:
            child.wait(deadline - time.monotonic())
        self.kill()

    def kill(self) -> None:
        """End the other ranks at once. Twice is fine."""
        for child in self._children:
            child.close()

    def _exchange(
        self, value: object, combine: Callable[[list[Any]], Any], timeout_s: float
    ) -> Any:
        if self._leader is None:
            # All have sent before anybody is answered: so each end waits for the other in turn.
            others = [child.receive(timeout_s=timeout_s) for child in self._children]
            combined = combine([value, *others])
            for child in self._children:
                child.send(combined, timeout_s=timeout_s)
            return combined
        try:
            self._leader.send(value, timeout_s=timeout_s)
            return self._leader.receive(timeout_s=timeout_s)
        except PipeClosed as error:
            raise KVRayError(
                f"Rank {self.rank} waited in vain for the leader: {error} {_ADVICE}"
            ) from error


def start_ranks(options: EngineOptions) -> Ranks:
    """Start the processes of the ranks besides this one, and have them load."""
    size, timeout_s = options.tensor_parallel_size, options.collective_timeout_s
    children: list[Child] = []
    ranks = Ranks(size=size, children=children, timeout_s=timeout_s)
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        for rank in range(1, size):
            env = path | dict(options.rank_env[rank - 1] if options.rank_env else {})
            child = Child(f"Rank {rank}", _MODULE, output=_STDERR, env=env, advice=_ADVICE)
            child.name += f" (pid {child.process.pid})"
            children.append(child)
        for rank, child in enumerate(children, start=1):
            child.send((rank, options), timeout_s=_TASK_TIMEOUT_S)
    except BaseException:
        ranks.kill()
        raise
    return ranks
