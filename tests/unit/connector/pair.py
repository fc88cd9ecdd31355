"""A scheduler and a worker on one small pool, driven by hand in the engine's order of calls."""

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from kvray.connector import KvRayScheduler, KvRayWorker
from kvray.connector.base import RequestData, SchedulerOutput
from kvray.engine.meta import ConnectorMeta

BLOCK = 4
NUM_BLOCKS = 64


def args_for(**changes: Any) -> SimpleNamespace:
    """Return an engine's arguments; `cache` changes its kv_cache_config."""
    cache = {"tokens_per_block": BLOCK, "enable_block_reuse": True, **changes.pop("cache", {})}
    return SimpleNamespace(model="nowhere", kv_cache_config=SimpleNamespace(**cache), **changes)


@dataclass
class Request:
    """What the connector reads of an engine's request."""

    request_id: int
    tokens: list[int]
    cache_salt_id: int | None = None
    lora_task_id: int | None = None
    matched: int = 0
    block_ids: list[int] = field(default_factory=list)

    def get_tokens(self, beam: int = 0) -> list[int]:
        return list(self.tokens)


class Pair:
    """One engine's connector. Blocks are given out in turn; rows are functions of the tokens."""

    def __init__(self, args: Any = None, *, shape: tuple[int, ...] = (NUM_BLOCKS, 2, 2, 8)):
        args = args_for() if args is None else args
        self.worker, self.scheduler = KvRayWorker(args), KvRayScheduler(args)
        self.pool = torch.full(shape, -1.0)
        self.worker.register_kv_caches(self.pool)
        self._next_block = itertools.cycle(range(shape[0]))

    def query(self, request: Request, computed: int = 0) -> int:
        """Ask for a match, as the cache manager does once it has allocated the blocks."""
        count = -(-len(request.tokens) // BLOCK)
        request.block_ids = [next(self._next_block) for _ in range(count)]
        self.pool[request.block_ids] = -1.0
        matched, is_later = self.scheduler.get_num_new_matched_tokens(request, computed)
        assert not is_later
        request.matched = matched
        self.scheduler.update_state_after_alloc(request, request.block_ids)
        return matched

    def plan(self, request: Request, computed: int = 0, *, accepted: bool = True) -> ConnectorMeta:
        """Build the metadata of the pass that computes the rest of the prompt, and bind it."""
        position = computed + (request.matched if accepted else 0)
        report = RequestData(
            request.request_id,
            list(request.tokens),
            list(request.block_ids),
            position - request.matched,
            len(request.tokens) - position,
        )
        meta = self.scheduler.build_connector_meta(SchedulerOutput(new_requests=[report]))
        self.worker.bind_connector_meta(meta)
        return meta

    def compute(self, request: Request) -> None:
        """Do the pass: every full block gets the sum of all tokens before its end."""
        for index, block_id in enumerate(request.block_ids):
            self.pool[block_id] = self.content(request, index)
        self.end_pass()

    def end_pass(self) -> None:
        """Run the layers, as far as the connector hears of them."""
        for layer in range(self.pool.shape[1]):
            self.worker.wait_for_layer_load(layer, None)
            self.worker.save_kv_layer(layer, None)
        self.worker.wait_for_save(None)

    def serve(self, request: Request, computed: int = 0) -> int:
        """Do all of it, and check what was loaded; return how many tokens were."""
        matched = self.query(request, computed)
        self.plan(request, computed)
        self.worker.start_load_kv(None)
        first = computed // BLOCK
        for index in range(first, first + matched // BLOCK):
            wanted = self.content(request, index)
            assert (self.pool[request.block_ids[index]] == wanted).all()
        self.compute(request)
        self.finish(request)
        return matched

    def finish(self, request: Request) -> None:
        """End the request; its blocks are the engine's again when this returns."""
        ids = [request.request_id]
        if self.scheduler.request_finished(request, request.block_ids):
            said = self.worker.get_finished(ids, [])[0]
            while not said:
                said = self.worker.get_finished([], [])[0]
            assert said == ids

    def content(self, request: Request, index: int) -> float:
        return float(
            sum((at + 1) * t for at, t in enumerate(request.tokens[: (index + 1) * BLOCK]))
        )

    def flush(self) -> None:
        """Return when all that was saved is committed."""
        self.worker._rank.close_pool()
        self.worker.register_kv_caches(self.pool)

    @property
    def totals(self) -> dict[str, int]:
        return self.worker._rank.shared.figures.totals

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()
