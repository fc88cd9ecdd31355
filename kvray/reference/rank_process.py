"""The process of a rank besides the leader, which starts it and which it never outlives."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvray.reference.child_process import PipeClosed, join_parent

if TYPE_CHECKING:
    from kvray.reference.engine_rank import EngineRank

_TASK_TIMEOUT_S = 30.0
_START_TIMEOUT_S = 120.0


def main() -> None:
    """Be the rank that the leader names, until the leader stops or ends, or something fails."""
    pipe = join_parent()
    try:
        number, path, options = pipe.receive(timeout_s=_TASK_TIMEOUT_S)
    except PipeClosed:
        sys.exit(1)
    sys.path[:] = path
    # Only now: a child takes its parent's path first, and these import torch.
    from kvray.reference.engine_rank import EngineRank
    from kvray.reference.ranks import Follower

    size, timeout_s = options.tensor_parallel_size, options.collective_timeout_s
    ranks = Follower(number, size, pipe, timeout_s=timeout_s)
    rank: EngineRank | None = None
    failure: BaseException | None
    try:
        ranks.meet(timeout_s=_START_TIMEOUT_S)
        rank = EngineRank(options, ranks)
        rank.executor.run()
        failure = rank.executor.failure
    except Exception as error:  # noqa: BLE001 (the process's end: the leader is told any cause)
        failure = error
    if failure is not None:
        ranks.fail(failure)
    if rank is not None:
        rank.shut_down()
    sys.exit(0 if failure is None else 1)


if __name__ == "__main__":
    main()
