"""Dynamo's selection service in a process of its own: its threads end with it."""

import asyncio
import threading
from typing import Any

from tests.far import Far
from tests.waiting import HANG_S

MODEL = {"model_name": "tiny", "tenant_id": "t"}


class Selection:
    """The test's end of it."""

    def __init__(self) -> None:
        self._far = Far("tests.kit.ray.selection:Service")

    def close(self) -> None:
        self._far.kill()

    def add(self, worker: int, live: str, replay: str, *, block_size: int) -> None:
        """Have it follow a replica's events."""
        self._ask(
            "upsert_worker",
            worker_id=worker,
            endpoint=f"ray://{worker}",
            block_size=block_size,
            max_num_batched_tokens=8192,
            data_parallel_start_rank=0,
            data_parallel_size=1,
            kv_events_endpoints={0: live},
            replay_endpoint=replay,
        )

    def overlaps(self, prompt: list[int]) -> dict[int, int]:
        """Return worker -> leading blocks of a prompt that it says the worker has in any tier."""
        return {
            one["worker_id"]: max(one["host_pinned_blocks"], one["disk_blocks"])
            for one in self._ask("overlap_scores", token_ids=prompt)["workers"]
        }

    def choose(self, prompt: list[int]) -> int:
        """Return the worker that it chooses."""
        return int(self._ask("select", token_ids=prompt)["worker_id"])

    def _ask(self, method: str, **about: Any) -> Any:
        return self._far.call("ask", method, {**MODEL, **about}, timeout_s=HANG_S)


class Service:
    """The far end: an event loop in which the service answers."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._service = self._run(self._start())

    def ask(self, method: str, argument: dict[str, Any]) -> Any:
        return self._run(self._answer(method, argument))

    async def _start(self) -> Any:
        from dynamo._core import SelectionService  # type: ignore[import-untyped]

        return SelectionService(indexer_threads=1)

    async def _answer(self, method: str, argument: dict[str, Any]) -> Any:
        return await getattr(self._service, method)(argument)

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
