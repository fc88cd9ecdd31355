"""The halves of a connector: constructed, warmed up with and given pools as an engine does it."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from tests.trtllm.memory import Memory
from tests.trtllm.version import Version

WARM_UP_LAYERS = 2


def construct(
    version: Version, ranks: Sequence[int], *, num_ranks: int, **args: Any
) -> tuple[list[Any], Any]:
    """Return a worker for each of `ranks`, and the scheduler of the first."""
    workers, scheduler = [], None
    for rank in ranks:
        llm_args = version.stand_in.llm_args(num_ranks=num_ranks, rank=rank, **args)
        with version.rank(rank):
            workers.append(version.worker_class(llm_args))
            if scheduler is None:
                scheduler = version.scheduler_class(llm_args)
    return workers, scheduler


def warm_up(workers: Sequence[Any]) -> None:
    """Do what engines do before there is a pool: passes, without anything bound."""
    for worker in workers:
        after_pass = worker.register_forward_pass_callable()
        for layer in range(WARM_UP_LAYERS):
            worker.wait_for_layer_load(layer, None)
            worker.save_kv_layer(layer, None)
        if after_pass is not None:
            after_pass()
        worker.start_load_kv(None)
        worker.wait_for_save(None)
        assert worker.get_finished([], []) == ([], [])


def register(
    workers: Sequence[Any], memories: Sequence[Memory], stand_in: ModuleType, *, has_groups: bool
) -> None:
    """Hand each rank's pools over: described in groups, or as one tensor."""
    for worker, memory in zip(workers, memories, strict=True):
        if has_groups:
            worker.register_kv_cache_layout(memory.layout(stand_in))
        else:
            worker.register_kv_caches(memory.pool())
