"""The processes of the ranks besides the leader, which never outlive it: both sides of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvray.errors import ConfigError, KVRayError
from kvray.reference.child_process import JsonPipe, PipeClosed, join_parent, spawn_child
from kvray.reference.engine_options import EngineOptions

if TYPE_CHECKING:  # torch is imported late: a child first joins its parent, and takes its path
    from kvray.reference.engine_rank import EngineRank
    from kvray.reference.ranks import GlooRanks, Ranks

_MODULE = "kvray.reference.rank_process"
_STDERR = 2
_TASK_TIMEOUT_S = 30.0
_REPORT_TIMEOUT_S = 5.0
_IMPORT_TIMEOUT_S = 120.0
_DIAGNOSIS_S = 2.0
_CLOSE_TIMEOUT_S = 20.0
_FAILED_TIMEOUT_S = 2.0


def start_ranks(options: EngineOptions) -> tuple[Ranks, RankProcesses]:
    """Start the ranks besides this one; return the collectives with them, and their processes."""
    from kvray.reference.ranks import SingleRank

    others = RankProcesses()
    if options.tensor_parallel_size == 1:
        return SingleRank(), others
    with tempfile.TemporaryDirectory(prefix="kvray-ranks-") as directory:
        try:
            others.start(options, directory)
            return _meet(0, options, directory, diagnose=others.diagnose), others
        except BaseException:
            others.kill()
            raise


class RankProcesses:
    """The processes of ranks 1 and up; they print to this process's stderr."""

    def __init__(self) -> None:
        self._children: list[_RankProcess] = []

    def start(self, options: EngineOptions, directory: str) -> None:
        """Start them and return when they wait for this rank in `directory`."""
        for rank in range(1, options.tensor_parallel_size):
            env = options.rank_env[rank - 1] if options.rank_env else {}
            self._children.append(_RankProcess(rank, env))
        task = {
            "directory": directory,
            "path": sys.path,
            "options": {one.name: getattr(options, one.name) for one in fields(options)},
        }
        for child in self._children:
            child.send(task)
        for child in self._children:
            child.wait_hello()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(child.pid for child in self._children)

    def diagnose(self) -> KVRayError | None:
        """Return the error of a rank that has ended, or None if all of them seem alive.

        A rank that was killed comes first, then one with an error of its own, and last those
        that failed because another did.
        """
        deadline = time.monotonic() + _DIAGNOSIS_S
        found = [child.cause_of_death(deadline) for child in self._children]
        return min(filter(None, found), key=lambda cause: cause[0], default=(0, None))[1]

    def close(self, *, has_failed: bool) -> None:
        """Wait until the ranks have ended, then kill those that have not. Twice is fine."""
        # After a failure one of them may hang: waiting longer would not help.
        deadline = time.monotonic() + (_FAILED_TIMEOUT_S if has_failed else _CLOSE_TIMEOUT_S)
        for child in self._children:
            child.wait(deadline)
        self.kill()

    def kill(self) -> None:
        """End the ranks at once. Twice is fine."""
        for child in self._children:
            child.kill()


class _RankProcess:
    def __init__(self, rank: int, env: Mapping[str, str]) -> None:
        self._rank = rank
        self._process, self._pipe = spawn_child(_MODULE, output=_STDERR, env=env)
        self.pid = self._process.pid
        self._name = f"Rank {rank} (pid {self.pid})"

    def send(self, task: dict[str, Any]) -> None:
        with self._starting():
            self._pipe.send({**task, "rank": self._rank}, timeout_s=_TASK_TIMEOUT_S)

    def wait_hello(self) -> None:
        """Wait until the child is about to meet the others: from there on nobody waits long."""
        with self._starting():
            message = self._pipe.receive(timeout_s=_IMPORT_TIMEOUT_S)
        if "error" in message:
            raise self._told(message)

    def cause_of_death(self, deadline: float) -> tuple[int, KVRayError] | None:
        """Return (how far from the root, the error), or None for one that seems to live."""
        try:
            report = self._pipe.receive(timeout_s=max(deadline - time.monotonic(), 0.0))
        except PipeClosed:
            code = self.wait(deadline)
            if code is None:
                return None
            end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited: {code}"
            return 0, KVRayError(f"{self._name} {end}. Restart the engine.")
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

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        try:
            yield
        except PipeClosed as error:
            _, cause = self.cause_of_death(time.monotonic() + _DIAGNOSIS_S) or (0, None)
            raise cause or KVRayError(f"{self._name} did not start: {error}") from error

    def _told(self, report: dict[str, Any]) -> KVRayError:
        kind = ConfigError if report["is_config"] else KVRayError
        return kind(f"{self._name} failed: {report['error']}")


def main() -> None:
    """Be the rank that the leader names, until the leader stops or ends, or something fails."""
    pipe = join_parent()
    try:
        task = pipe.receive(timeout_s=_TASK_TIMEOUT_S)
    except PipeClosed:
        sys.exit(1)
    sys.path[:] = task["path"]
    threading.Thread(target=_end_with, args=(pipe,), name="kvray-leader", daemon=True).start()
    rank: EngineRank | None = None
    try:
        from kvray.reference.engine_rank import EngineRank

        options = EngineOptions(**task["options"])
        pipe.send({"hello": task["rank"]}, timeout_s=_REPORT_TIMEOUT_S)
        ranks = _meet(task["rank"], options, task["directory"])
        try:
            rank = EngineRank(options, ranks)
        except BaseException:
            ranks.leave()
            raise
        rank.executor.run()
        failure = rank.executor.failure
    except Exception as error:  # noqa: BLE001 (the process's end: the leader is told any cause)
        failure = error
    if failure is not None:
        _report(pipe, task["rank"], failure)
    if rank is not None:
        rank.shut_down()
    sys.exit(0 if failure is None else 1)


def _report(pipe: JsonPipe, rank: int, failure: BaseException) -> None:
    from kvray.reference.ranks import CollectiveError

    sentence = str(failure) if isinstance(failure, KVRayError) else repr(failure)
    print(f"kvray: rank {rank} ends: {sentence}", file=sys.stderr, flush=True)
    report = {
        "error": sentence,
        "is_config": isinstance(failure, ConfigError),
        "is_collective": isinstance(failure, CollectiveError),
    }
    with contextlib.suppress(PipeClosed):
        pipe.send(report, timeout_s=_REPORT_TIMEOUT_S)


def _end_with(pipe: JsonPipe) -> None:
    """End the process when the leader has ended, which sends nothing after the task."""
    with contextlib.suppress(PipeClosed):
        pipe.receive(timeout_s=None)
    os._exit(1)


def _meet(rank: int, options: EngineOptions, directory: str, **diagnose: Any) -> GlooRanks:
    from kvray.reference.ranks import GlooRanks

    size, timeout_s = options.tensor_parallel_size, options.collective_timeout_s
    return GlooRanks(rank, size, Path(directory), timeout_s=timeout_s, **diagnose)


if __name__ == "__main__":
    main()
