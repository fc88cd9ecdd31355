"""Dynamo's selection service in a process of its own: its threads end with it.

Run as `python -m tests.ray.selection`; reads a JSON list `[method, argument]` a line, and answers
with a JSON value.
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.waiting import HANG_S

ROOT = Path(__file__).parents[2]
MODEL = {"model_name": "tiny", "tenant_id": "t"}


class Selection:
    """The test's end of it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.ray.selection"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def close(self) -> None:
        self._process.communicate("", timeout=HANG_S)

    def add(self, worker: int, live: str, replay: str, *, block_size: int) -> None:
        """Have it follow a replica's events."""
        self._ask(
            "upsert_worker",
            {
                **MODEL,
                "worker_id": worker,
                "endpoint": f"ray://{worker}",
                "block_size": block_size,
                "max_num_batched_tokens": 8192,
                "data_parallel_start_rank": 0,
                "data_parallel_size": 1,
                "kv_events_endpoints": {"0": live},
                "replay_endpoint": replay,
            },
        )

    def overlaps(self, prompt: list[int]) -> dict[int, int]:
        """Return worker -> leading blocks of a prompt that it says the worker has in any tier."""
        answer = self._ask("overlap_scores", {**MODEL, "token_ids": prompt})
        return {
            one["worker_id"]: max(one["host_pinned_blocks"], one["disk_blocks"])
            for one in answer["workers"]
        }

    def choose(self, prompt: list[int]) -> int:
        """Return the worker that it chooses."""
        return int(self._ask("select", {**MODEL, "token_ids": prompt})["worker_id"])

    def _ask(self, method: str, argument: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([method, argument]) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer
        return answer["answer"]


async def main() -> None:
    from dynamo._core import SelectionService  # type: ignore[import-untyped]

    service = SelectionService(indexer_threads=1)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        method, argument = json.loads(line)
        if method == "upsert_worker":
            places = argument["kv_events_endpoints"]
            argument["kv_events_endpoints"] = {int(rank): its for rank, its in places.items()}
        try:
            answer = {"answer": await getattr(service, method)(argument)}
        except Exception as error:  # noqa: BLE001 - the test shows it
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)
    service.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
