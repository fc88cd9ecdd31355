"""TensorRT-LLM's end of the connector: its arguments, a checkpoint's files, requests, an engine."""

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvray.connector import KvRayScheduler, KvRayWorker, base
from kvray.connector.base import RequestData, SchedulerOutput
from kvray.connector.start import EngineArgs, read_engine_args
from kvray.engine.meta import ConnectorMeta
from kvray.engine.shared_state import SharedState
from kvray.store import Arena
from kvray.store.arena.payload import slot_bytes
from tests.waiting import wait_for

BLOCK = 4
NUM_BLOCKS = 64
PROMPT = list(range(100, 140))
NUM_WANTED = (len(PROMPT) - 1) // BLOCK
HIT = NUM_WANTED * BLOCK

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
DEEPSEEK = LLAMA | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


def args_for(**changes: Any) -> SimpleNamespace:
    """Return an engine's arguments; `cache` changes its kv_cache_config."""
    cache = {"tokens_per_block": BLOCK, "enable_block_reuse": True, **changes.pop("cache", {})}
    fields = {"model": "nowhere", "kv_cache_config": SimpleNamespace(**cache), **changes}
    return SimpleNamespace(**fields)


def parallel(rank: int) -> SimpleNamespace:
    return SimpleNamespace(to_mapping=lambda: SimpleNamespace(rank=rank))


def read_args(llm_args: Any) -> EngineArgs:
    """Return the settings of `llm_args`, as a start of the engine would."""
    return read_engine_args(
        llm_args,
        asks_every_rank=base.asks_every_rank(),
        takes_offers_later=base.takes_offers_later(),
    )


def checkpoint(directory: Path, config: dict[str, Any], **files: Any) -> str:
    """Write configuration files, config.json and those of `files`; return where."""
    for name, content in {"config": config, **files}.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return str(directory)


def stand_in(patch: pytest.MonkeyPatch, name: str, **contents: Any) -> ModuleType:
    """Have a module of that name, with these contents, as if an engine had imported it."""
    made = ModuleType(name)
    vars(made).update(contents)
    patch.setitem(sys.modules, name, made)
    return made


def flip_a_byte(arena: Arena, *, depth: int) -> None:
    tables = arena.tables
    (victim,) = ((tables.slot_depth == depth) & (tables.slot_state == 2)).nonzero()[0]
    slot_bytes(tables, int(victim))[3] ^= 1


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
    """A scheduler and a worker on one small pool, driven by hand in the engine's order of calls.

    Blocks are given out in turn; their rows are functions of the tokens, and of the rank.
    """

    def __init__(
        self, args: Any = None, *, shape: tuple[int, ...] = (NUM_BLOCKS, 2, 2, 8), rank: int = 0
    ) -> None:
        args = args_for() if args is None else args
        self._rank = rank
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

    def begin_pass(self, *reports: RequestData, **output: list[RequestData]) -> ConnectorMeta:
        """Plan the pass of new requests, or of others, and begin it."""
        planned = SchedulerOutput(new_requests=list(reports), **output)
        meta = self.scheduler.build_connector_meta(planned)
        self.worker.bind_connector_meta(meta)
        self.worker.start_load_kv(None)
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

    def begin(self, request: Request, computed: int = 0) -> ConnectorMeta:
        """Ask for a match, plan the pass and begin it."""
        self.query(request, computed)
        meta = self.plan(request, computed)
        self.worker.start_load_kv(None)
        return meta

    def check(self, request: Request, matched: int = HIT, computed: int = 0) -> None:
        """Check what was loaded behind `computed` tokens."""
        for index in range(computed // BLOCK, (computed + matched) // BLOCK):
            wanted = self.content(request, index)
            assert (self.pool[request.block_ids[index]] == wanted).all()

    def serve(self, request: Request, computed: int = 0) -> int:
        """Do all of it, and check what was loaded; return how many tokens were."""
        self.begin(request, computed)
        self.check(request, request.matched, computed)
        self.compute(request)
        self.finish(request)
        return request.matched

    def store(self, tokens: list[int]) -> None:
        """Have the blocks of a prompt in the tier."""
        self.serve(Request(1, tokens))
        self.flush()

    def finish(self, request: Request) -> None:
        """End the request; its blocks are the engine's again when this returns."""
        ids = [request.request_id]
        if self.scheduler.request_finished(request, request.block_ids):
            said = self.worker.get_finished(ids, [])[0]
            while not said:
                said = self.worker.get_finished([], [])[0]
            assert said == ids

    def content(self, request: Request, index: int) -> float:
        tokens = request.tokens[: (index + 1) * BLOCK]
        return float(sum((at + 1) * t for at, t in enumerate(tokens)) + 0.5 * self._rank)

    def flush(self) -> None:
        """Return when all that was saved is committed."""
        self.worker._rank.close_pool()
        self.worker.register_kv_caches(self.pool)

    @property
    def engine(self) -> SharedState:
        return self.worker._rank.shared

    @property
    def totals(self) -> dict[str, int]:
        return self.engine.figures.totals

    @property
    def arena(self) -> Arena:
        arena = self.engine.link.arena
        assert arena is not None
        return arena

    @property
    def leased(self) -> int:
        """How many blocks are leased."""
        return int(self.arena.stats()["leased_blocks"])

    def wait_for_arena(self) -> None:
        wait_for(lambda: self.engine.link.arena is not None, "joining the tier")

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


@dataclass
class GroupedRequest(Request):
    """One of an engine whose layers have two groups: its pages in either."""

    py_num_connector_matched_tokens: int = 0
    full: list[int] = field(default_factory=list)
    window: list[int] = field(default_factory=list)

    def content(self, block: int) -> int:
        """Return what each byte of a block is."""
        return sum(self.tokens[: (block + 1) * BLOCK]) % 251


WINDOW = 10
FULL_BYTES, SHARED_BYTES, WINDOW_BYTES = 64, 8, 32


class GroupedEngine(Pair):
    """One rank whose cache has full attention, bytes that all ranks share, and a window."""

    def __init__(self, **changes: Any) -> None:
        reuse = SimpleNamespace(policy="per_request")
        cache = {"use_kv_cache_manager_v2": True, "block_reuse_config": reuse}
        args = args_for(cache=cache, **changes)
        self.worker, self.scheduler = KvRayWorker(args), KvRayScheduler(args)
        self.memory = {
            size: torch.full((NUM_BLOCKS, size), 255, dtype=torch.uint8)
            for size in (FULL_BYTES, SHARED_BYTES, WINDOW_BYTES)
        }
        full, shared, window = (
            region_of(self.memory[FULL_BYTES], [0, 2]),
            region_of(self.memory[SHARED_BYTES], [0, 2], "index"),
            region_of(self.memory[WINDOW_BYTES], [1]),
        )
        self.layout = layout_of(
            group_of(0, [0, 2], full, replicated_regions=(shared,)),
            group_of(1, [1], window, window_size=WINDOW),
        )
        self.worker.register_kv_cache_layout(self.layout)
        self._next_block = itertools.cycle(range(NUM_BLOCKS))

    def query(self, request: GroupedRequest, computed: int = 0) -> int:
        matched, is_later = self.scheduler.get_num_new_matched_tokens(request, computed)
        assert not is_later
        return matched

    def give_pages(self, request: GroupedRequest, *, window_from: int = 0) -> None:
        """Give a request its pages; blocks before `window_from` have none in the window."""
        pages = [next(self._next_block) for _ in range(-(-len(request.tokens) // BLOCK))]
        request.full = pages
        request.window = [-1 if n < window_from else p for n, p in enumerate(reversed(pages))]
        for memory in self.memory.values():
            memory[pages] = 254

    def run(self, request: GroupedRequest, *, taken: int) -> ConnectorMeta:
        """Do the pass that computes all but `taken` tokens."""
        request.py_num_connector_matched_tokens = taken
        pages, left = [request.full, request.window], len(request.tokens) - taken
        report = RequestData(
            request.request_id,
            list(request.tokens),
            [],
            0,
            left,
            new_block_ids_by_layer_group=pages,
        )
        meta = self.begin_pass(report)
        self.compute_from(request, taken)
        return meta

    def compute_from(self, request: GroupedRequest, taken: int) -> None:
        for block in range(taken // BLOCK, len(request.tokens) // BLOCK):
            for row in self._rows(request, block):
                row[:] = request.content(block)
        self.worker.wait_for_save(None)

    def has(self, request: GroupedRequest, block: int) -> list[bool]:
        """Whether a block's bytes are right: full, shared and, if it has a page there, window."""
        return [bool((row == request.content(block)).all()) for row in self._rows(request, block)]

    def _rows(self, request: GroupedRequest, block: int) -> list[torch.Tensor]:
        full, window = request.full[block], request.window[block]
        rows = [self.memory[FULL_BYTES][full], self.memory[SHARED_BYTES][full]]
        return rows if window < 0 else [*rows, self.memory[WINDOW_BYTES][window]]

    def flush(self) -> None:
        self.worker._rank.close_pool()
        self.worker.register_kv_cache_layout(self.layout)


def layout_of(*groups: Any, **fields: Any) -> Any:
    """Return what an engine with layer groups says of its cache."""
    fields = {"tokens_per_block": BLOCK, "dtype": torch.uint8, **fields}
    return SimpleNamespace(groups=groups, **fields)


def group_of(index: int, layers: Sequence[int], *regions: Any, **fields: Any) -> Any:
    fields = {"window_size": None, "replicated_regions": (), **fields}
    return SimpleNamespace(layer_group_id=index, layer_ids=layers, regions=regions, **fields)


def region_of(pages: torch.Tensor, layers: Sequence[int], roles: str = "key value") -> Any:
    """Return what an engine says of a region that is `pages`, u8 [num_pages, page bytes]."""
    return SimpleNamespace(
        base=pages.data_ptr(),
        size=pages.shape[1],
        stride=pages.stride(0),
        num_slots=len(pages),
        as_tensor=lambda _dtype: pages,
        buffers=[SimpleNamespace(layer_id=n, role=role) for n in layers for role in roles.split()],
    )
