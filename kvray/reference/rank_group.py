"""The leader's hold on the processes of the other ranks; they never outlive it."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvray.errors import ConfigError, KVRayError
from kvray.reference.child_process import spawn_child
from kvray.reference.engine_options import EngineOptions, encode_options
from kvray.reference.pipe import PipeClosed
from kvray.reference.ranks import Ranks, SingleRank

_CHILD_MODULE = "kvray.reference.rank_child"
_STDERR = 2
_SEND_TIMEOUT_S = 30.0
_IMPORT_TIMEOUT_S = 120.0
_DIAGNOSIS_S = 2.0
_CLOSE_TIMEOUT_S = 20.0
_FAILED_TIMEOUT_S = 2.0


def start_ranks(options: EngineOptions) -> tuple[Ranks, RankGroup]:
    """Start the ranks besides this one; return the collectives with them, and their processes.

    Raises:
        KVRayError: one of them did not start.
    """
    if options.tensor_parallel_size == 1:
        return SingleRank(), RankGroup()
    from kvray.reference.gloo_ranks import GlooRanks

    with tempfile.TemporaryDirectory(prefix="kvray-ranks-") as name:
        directory = Path(name)
        others = RankGroup.start(options, directory)
        try:
            ranks = GlooRanks(
                0,
                options.tensor_parallel_size,
                directory,
                timeout_s=options.collective_timeout_s,
                diagnose=others.diagnose,
            )
        except BaseException:
            others.kill()
            raise
    return ranks, others


class RankGroup:
    """The processes of ranks 1 and up; what they print goes to this process's stderr."""

    def __init__(self, children: Sequence[_RankProcess] = ()) -> None:
        self._children = children

    @classmethod
    def start(cls, options: EngineOptions, directory: Path) -> RankGroup:
        """Start them and return when they wait for this rank in `directory`.

        Raises:
            KVRayError: one of them did not start.
        """
        children: list[_RankProcess] = []
        group = cls(children)
        try:
            for rank in range(1, options.tensor_parallel_size):
                env = options.rank_env[rank - 1] if options.rank_env else {}
                children.append(_RankProcess(rank, env))
            for child in children:
                child.send(_task(options, child.rank, directory))
            for child in children:
                child.wait_hello()
        except BaseException:
            group.kill()
            raise
        return group

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids, in the order of the ranks."""
        return tuple(child.pid for child in self._children)

    def diagnose(self) -> KVRayError | None:
        """Return what ended the first rank that has ended, or None if all of them seem alive.

        A rank that was killed, or says why it failed, goes before those that failed for want of
        another.
        """
        deadline = time.monotonic() + _DIAGNOSIS_S
        found = [child.cause_of_death(deadline) for child in self._children]
        causes = sorted((cause for cause in found if cause is not None), key=lambda one: one[0])
        return causes[0][1] if causes else None

    def close(self, *, has_failed: bool) -> None:
        """Wait until the ranks have ended and make sure of it. Twice is fine.

        After a failure one of them may be what hangs, so there is less patience.
        """
        patience_s = _FAILED_TIMEOUT_S if has_failed else _CLOSE_TIMEOUT_S
        deadline = time.monotonic() + patience_s
        for child in self._children:
            child.wait(deadline)
        self.kill()

    def kill(self) -> None:
        """End the ranks at once. Twice is fine."""
        for child in self._children:
            child.kill()


def _task(options: EngineOptions, rank: int, directory: Path) -> dict[str, Any]:
    fields = dataclasses.fields(options)
    return {
        "rank": rank,
        "directory": str(directory),
        "path": sys.path,
        "options": encode_options({item.name: getattr(options, item.name) for item in fields}),
    }


class _RankProcess:
    """One child, from its start to its end."""

    def __init__(self, rank: int, env: Mapping[str, str]) -> None:
        self.rank = rank
        self._process, self._pipe = spawn_child(_CHILD_MODULE, output=_STDERR, env=env)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, task: dict[str, Any]) -> None:
        try:
            self._pipe.send(task, timeout_s=_SEND_TIMEOUT_S)
        except PipeClosed as error:
            raise self._failure_to_start(error) from error

    def wait_hello(self) -> None:
        """Wait until the child is about to meet the others: from there on nobody waits long."""
        try:
            message = self._pipe.receive(timeout_s=_IMPORT_TIMEOUT_S)
        except PipeClosed as error:
            raise self._failure_to_start(error) from error
        if "error" in message:
            raise self._told(message)

    def cause_of_death(self, deadline: float) -> tuple[int, KVRayError] | None:
        """Return (how far from the root, the sentence), or None for one that seems to live."""
        try:
            report = self._pipe.receive(timeout_s=max(deadline - time.monotonic(), 0.0))
        except PipeClosed:
            code = self.wait(deadline)
            if code is None:
                return None
            end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited: {code}"
            return 0, KVRayError(f"Rank {self.rank} (pid {self.pid}) {end}. Start the engine anew.")
        return 2 if report["is_collective"] else 1, self._told(report)

    def wait(self, deadline: float) -> int | None:
        """Return the exit status, or None if there is none by the deadline."""
        try:
            return self._process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()

    def _failure_to_start(self, error: PipeClosed) -> KVRayError:
        cause = self.cause_of_death(time.monotonic() + _DIAGNOSIS_S)
        if cause is not None:
            return cause[1]
        return KVRayError(f"Rank {self.rank} (pid {self.pid}) did not start: {error}")

    def _told(self, report: dict[str, Any]) -> KVRayError:
        kind = ConfigError if report["is_config"] else KVRayError
        return kind(f"Rank {self.rank} (pid {self.pid}) failed: {report['error']}")
