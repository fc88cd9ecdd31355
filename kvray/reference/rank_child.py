"""The process of a rank that is not the leader."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvray.errors import ConfigError, KVRayError
from kvray.reference.child_process import join_parent
from kvray.reference.engine_options import EngineOptions, decode_options
from kvray.reference.pipe import JsonPipe, PipeClosed

if TYPE_CHECKING:
    from kvray.reference.engine_rank import EngineRank

_TASK_TIMEOUT_S = 30.0
_SEND_TIMEOUT_S = 5.0


def main() -> None:
    """Be the rank that the leader says, until it says stop, ends, or something fails."""
    pipe = join_parent()
    try:
        task = pipe.receive(timeout_s=_TASK_TIMEOUT_S)
    except PipeClosed:
        sys.exit(1)
    sys.path[:] = task["path"]
    threading.Thread(target=_end_with, args=(pipe,), name="kvray-leader", daemon=True).start()
    rank: EngineRank | None = None
    try:
        rank = _bring_up(task, pipe)
        rank.executor.run()
        failure = rank.executor.failure
    except Exception as error:  # noqa: BLE001 (the process's end: the leader is told any cause)
        failure = error
    if failure is not None:
        _report(pipe, task["rank"], failure)
    if rank is not None:
        rank.shut_down()
    sys.exit(0 if failure is None else 1)


def _bring_up(task: dict[str, Any], pipe: JsonPipe) -> EngineRank:
    from kvray.reference.engine_rank import EngineRank
    from kvray.reference.gloo_ranks import GlooRanks

    options = EngineOptions(**decode_options(task["options"]))
    pipe.send({"hello": task["rank"]}, timeout_s=_SEND_TIMEOUT_S)
    ranks = GlooRanks(
        task["rank"],
        options.tensor_parallel_size,
        Path(task["directory"]),
        timeout_s=options.collective_timeout_s,
    )
    try:
        return EngineRank(options, ranks, None)
    except BaseException:
        ranks.leave()
        raise


def _report(pipe: JsonPipe, rank: int, failure: BaseException) -> None:
    """Tell people and the leader."""
    from kvray.reference.gloo_ranks import CollectiveError

    sentence = str(failure) if isinstance(failure, KVRayError) else repr(failure)
    print(f"kvray: rank {rank} ends: {sentence}", file=sys.stderr, flush=True)
    report = {
        "error": sentence,
        "is_config": isinstance(failure, ConfigError),
        "is_collective": isinstance(failure, CollectiveError),
    }
    with contextlib.suppress(PipeClosed):
        pipe.send(report, timeout_s=_SEND_TIMEOUT_S)


def _end_with(pipe: JsonPipe) -> None:
    """End the process when the leader has ended, whatever it is doing; it says nothing more."""
    with contextlib.suppress(PipeClosed):
        pipe.receive(timeout_s=None)
    os._exit(1)


if __name__ == "__main__":
    main()
