"""A correct connector over a dict, and a journal of every call that it gets.

The engine finds the classes by this module's name, as TensorRT-LLM finds a connector, so what
they share with a test is the module's `state`. Where each rank is a process, a test sees of the
others the journal of their calls, below the directory that `DIRECTORY_VARIABLE` names.
"""

import os
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvray.connector.base import (
    KvCacheConnectorScheduler,
    KvCacheConnectorWorker,
    RequestData,
    SchedulerOutput,
)
from kvray.reference.engine_options import KvConnectorConfig

Key = tuple[str | None, tuple[int, ...]]

CONFIG = KvConnectorConfig(
    connector_module="tests.engine.fake_connector",
    connector_scheduler_class="Scheduler",
    connector_worker_class="Worker",
)
DIRECTORY_VARIABLE = "RANK_CONNECTOR_DIRECTORY"


@dataclass
class State:
    """The settings of a test, and the record that it reads."""

    store: dict[Key, torch.Tensor] = field(default_factory=dict)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    outputs: list[SchedulerOutput] = field(default_factory=list)
    offer: tuple[int, bool] | None = None
    is_async_save: bool = False
    hold: threading.Event | None = None
    raise_in: str = ""

    def note(self, name: str, *details: Any) -> None:
        self.calls.append((name, *details))
        if name == self.raise_in:
            raise RuntimeError(f"told to fail in {name}")

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def reported(self) -> list[RequestData]:
        """Return what all passes said of requests."""
        return [
            one for output in self.outputs for one in output.new_requests + output.cached_requests
        ]

    def reports(self) -> list[tuple[list[int], int, int, int]]:
        """Return of each report: tokens, number of blocks, place, length."""
        return [
            (
                one.new_tokens,
                len(one.new_block_ids),
                one.computed_position,
                one.num_scheduled_tokens,
            )
            for one in self.reported()
        ]


state = State()


def reset() -> State:
    global state
    state = State()
    return state


class Scheduler(KvCacheConnectorScheduler):
    supports_attention_dp = True

    def __init__(self, llm_args: Any) -> None:
        prepare(llm_args)
        super().__init__(llm_args)
        state.note("scheduler", threading.current_thread().name)
        self._size = llm_args.kv_cache_config.tokens_per_block
        self._loads: dict[int, tuple[int, int]] = {}
        self._has_drafts = llm_args.speculative_config is not None
        self._num_prompt_blocks: dict[int, int] = {}
        self._tokens: dict[int, list[int]] = {}
        self._blocks: dict[int, list[int]] = {}
        self._to_load: list[tuple[int, int, Key]] = []

    def wait_for_initialization(self) -> None:
        state.note("wait_for_initialization")

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        state.note("get_num_new_matched_tokens", request.request_id, num_computed_tokens)
        if state.offer is not None:
            return state.offer
        if num_computed_tokens % self._size:
            return 0, False
        tokens = request.get_tokens(0)
        end = num_computed_tokens
        while (
            end + self._size < len(tokens) and self._key(request, end + self._size) in state.store
        ):
            end += self._size
        matched = end - num_computed_tokens
        self._loads[request.request_id] = (num_computed_tokens, matched)
        return matched, False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        state.note("update_state_after_alloc", request.request_id, list(block_ids))
        start, matched = self._loads.pop(request.request_id, (0, 0))
        for index in range(start // self._size, (start + matched) // self._size):
            key = self._key(request, (index + 1) * self._size)
            self._to_load.append((request.request_id, block_ids[index], key))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        state.note("build_connector_meta")
        state.outputs.append(scheduler_output)
        saves = []
        loaded = Counter(request_id for request_id, _, _ in self._to_load)
        for data in scheduler_output.new_requests + scheduler_output.cached_requests:
            tokens = self._tokens.setdefault(data.request_id, [])
            blocks = self._blocks.setdefault(data.request_id, [])
            tokens += data.new_tokens
            blocks += data.new_block_ids
            num_prompt_blocks = self._num_prompt_blocks.setdefault(
                data.request_id, len(tokens) // self._size
            )
            end = data.computed_position + data.num_scheduled_tokens
            end += loaded[data.request_id] * self._size
            num_blocks = min(end, len(tokens)) // self._size
            if self._has_drafts:  # a rewind makes the ids of later blocks untrue
                num_blocks = min(num_blocks, num_prompt_blocks)
            for index in range(num_blocks):
                key = (data.cache_salt, tuple(tokens[: (index + 1) * self._size]))
                saves.append((blocks[index], key))
        metadata = {"loads": self._to_load, "saves": saves}
        self._to_load = []
        return metadata

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        state.note("request_finished", request.request_id)
        return state.is_async_save

    def _key(self, request: Any, end: int) -> Key:
        return request.cache_salt, tuple(request.get_tokens(0)[:end])


class Worker(KvCacheConnectorWorker):
    supports_attention_dp = True

    def __init__(self, llm_args: Any) -> None:
        prepare(llm_args)
        super().__init__(llm_args)
        state.note("worker", threading.current_thread().name)
        self._pool: torch.Tensor | None = None
        self._started: Any = None
        self._saving: list[int] = []

    def register_forward_pass_callable(self) -> Any:
        state.note("register_forward_pass_callable")
        return lambda: state.note("forward_callable", self._pool is not None, self._metadata)

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        state.note("register_kv_caches")
        self._pool = kv_cache_tensor

    def bind_connector_meta(self, metadata: Any) -> None:
        state.note("bind_connector_meta")
        super().bind_connector_meta(metadata)

    def start_load_kv(self, stream: Any) -> None:
        state.note("start_load_kv", stream)
        assert self._pool is not None
        metadata: Any = self.get_connector_meta()
        if metadata is self._started:
            return
        self._started = metadata
        for _, block_id, key in metadata["loads"]:
            self._pool[block_id].copy_(state.store[key])

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        state.note("wait_for_layer_load", layer_idx)

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        state.note("save_kv_layer", layer_idx)

    def wait_for_save(self, stream: Any) -> None:
        state.note("wait_for_save")
        assert self._pool is not None
        metadata: Any = self.get_connector_meta()
        for block_id, key in metadata["saves"]:
            block = self._pool[block_id]
            assert not block.isnan().any(), "a full block has every row"
            known = state.store.setdefault(key, block.clone())
            assert torch.equal(known, block), "equal tokens have equal bytes"

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        state.note("get_finished", list(finished_gen_req_ids), list(started_loading_req_ids))
        self._saving += finished_gen_req_ids
        if state.hold is not None and not state.hold.is_set():
            return [], []
        saved, self._saving = self._saving, []
        return saved, []


class Journal(list[tuple[Any, ...]]):
    """Calls that are also lines of a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def append(self, call: tuple[Any, ...]) -> None:
        super().append(call)
        with self._path.open("a") as file:
            file.write(f"{call[0]}\n")


def prepare(llm_args: Any) -> None:
    """Lead this process's connector to its rank's files, where there are some."""
    if DIRECTORY_VARIABLE not in os.environ:
        return
    rank = llm_args.parallel_config.to_mapping().rank
    directory = Path(os.environ[DIRECTORY_VARIABLE])
    if not isinstance(state.calls, Journal):
        state.calls = Journal(journal_path(directory, rank))
    failing = directory / f"fail-{rank}"
    state.raise_in = failing.read_text() if failing.exists() else ""


def journal_path(directory: Path, rank: int) -> Path:
    return directory / f"calls-{rank}"
