"""One rank of an engine: its share of the model, a pool, a connector and an executor.

It starts in TensorRT-LLM's order: constructors, warm-up, and only then the pool.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kvray.errors import ConfigError
from kvray.reference.cache_manager import KVCacheManager
from kvray.reference.checkpoint import Checkpoint, load_checkpoint
from kvray.reference.connector_manager import KvCacheConnectorManager
from kvray.reference.engine_options import EngineOptions
from kvray.reference.executor import Executor
from kvray.reference.intake import Intake
from kvray.reference.model_engine import ModelEngine
from kvray.reference.output import Output
from kvray.reference.ranks import Ranks
from kvray.reference.request import LlmRequest

START_TIMEOUT_S = 300.0
"""How much longer one rank may take than another to load its model."""


class EngineRank:
    """One rank, ready to run.

    Each rank has a scheduler with attention data parallelism, otherwise only the leader has one.
    The start fails with the connector's own error, as upstream. A ConfigError says that model or
    connector cannot be used, a KVRayError that another rank failed.
    """

    def __init__(self, options: EngineOptions, ranks: Ranks) -> None:
        torch.set_num_threads(options.num_threads)
        self._options = options
        self._split_over = ranks if options.is_split else None
        checkpoint = self._load(options.model)
        self.tokenizer = checkpoint.tokenizer
        self.model = checkpoint.model
        self.llm_args = _llm_args(options, ranks, checkpoint.name)
        self.cache = KVCacheManager(self.model.geometry, options)
        ranks.meet(timeout_s=START_TIMEOUT_S)
        self.connector: KvCacheConnectorManager | None = None
        if self.llm_args.kv_connector_config is not None:
            self.connector = _make_connector(self.llm_args, ranks)
        try:
            model_engine = self._warm_up()
            ranks.meet(timeout_s=START_TIMEOUT_S)
        except BaseException:
            self.shut_down()
            raise
        self.intake = Intake(ranks, self._output_of, is_dealt=options.enable_attention_dp)
        self.executor = Executor(
            model_engine,
            self.cache,
            self.intake,
            options,
            self.connector,
            lambda model: self._load(model).model,
        )

    def shut_down(self) -> None:
        """Let the connector go. Twice is fine."""
        connector, self.connector = self.connector, None
        if connector is not None:
            _shut_down_parts((connector.worker, connector.scheduler))

    def _load(self, model: str | Path) -> Checkpoint:
        options = self._options
        return load_checkpoint(
            model,
            tokens_per_step=options.blocks_per_step * options.tokens_per_block,
            split_over=self._split_over,
            device=options.device,
        )

    def _output_of(self, request: LlmRequest) -> Output:
        """Describe a request that has ended."""
        tokens = request.generated_tokens
        has_hits = self.cache.enable_block_reuse
        return Output(
            text=self.tokenizer.decode(tokens),
            token_ids=tuple(tokens),
            prompt_tokens=request.prompt_len,
            reused_tokens=request.reused_tokens,
            hit_tokens=request.py_num_connector_matched_tokens if has_hits else 0,
            ttft_s=max(request.first_token_at - request.submitted_at, 0.0),
            finish_reason=request.finish_reason or "",
            drafted_tokens=request.drafted_tokens,
            accepted_tokens=request.accepted_tokens,
        )

    def _warm_up(self) -> ModelEngine:
        """Run passes before the worker has a pool: its forward callable fires, its hooks do not."""
        connector, after_pass = self.connector, None
        if connector is not None:
            after_pass = connector.worker.register_forward_pass_callable()
        model_engine = ModelEngine(self.model, self.cache, forward_callable=after_pass)
        model_engine.warm_up()
        if connector is not None:
            connector.worker.register_kv_caches(self.cache.get_unique_primary_pool())
            model_engine.hooks = connector.worker
            # Connectors written for 1.2 have no such method.
            wait_for = getattr(connector.scheduler, "wait_for_initialization", None)
            if wait_for is not None:
                wait_for()
            self.cache.connector = connector
        return model_engine


def _llm_args(options: EngineOptions, ranks: Ranks, model: str) -> SimpleNamespace:
    """Return what a connector's constructors get of TensorRT-LLM's `TorchLlmArgs`."""
    mapping = SimpleNamespace(rank=ranks.rank)
    drafts = None
    if options.max_draft_len:
        drafts = SimpleNamespace(decoding_type="NGram", max_draft_len=options.max_draft_len)
    return SimpleNamespace(
        model=model,
        tensor_parallel_size=ranks.size,
        gpus_per_node=options.ranks_per_node,
        enable_attention_dp=options.enable_attention_dp,
        parallel_config=SimpleNamespace(to_mapping=lambda: mapping),
        enable_chunked_prefill=options.enable_chunked_prefill,
        disable_overlap_scheduler=not options.overlap,
        kv_cache_config=SimpleNamespace(
            tokens_per_block=options.tokens_per_block,
            enable_block_reuse=options.enable_block_reuse,
            enable_partial_reuse=options.enable_partial_reuse,
        ),
        kv_connector_config=options.connector,
        speculative_config=drafts,
    )


def _make_connector(llm_args: SimpleNamespace, ranks: Ranks) -> KvCacheConnectorManager:
    """Build worker and scheduler at the same time on two threads, as upstream does."""
    config: Any = llm_args.kv_connector_config
    try:
        module = importlib.import_module(config.connector_module)
        scheduler_class = getattr(module, config.connector_scheduler_class)
        worker_class = getattr(module, config.connector_worker_class)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"The connector {config.connector_module!r} cannot be used: {error}."
        ) from error
    is_owner = llm_args.enable_attention_dp
    if is_owner:
        _check_attention_dp(scheduler_class, worker_class)
    with ThreadPoolExecutor(2, thread_name_prefix="kvray-connector") as threads:
        parts: list[Future[Any]] = [threads.submit(worker_class, llm_args)]
        if is_owner or ranks.rank == 0:
            parts.insert(0, threads.submit(scheduler_class, llm_args))
        wait(parts)
    if any(part.exception() for part in parts):
        _shut_down_parts(part.result() for part in parts if part.exception() is None)
    *scheduler, worker = (part.result() for part in parts)
    return KvCacheConnectorManager(
        worker,
        scheduler[0] if scheduler else None,
        ranks=None if is_owner else ranks,
        attention_dp_rank=ranks.rank if is_owner else None,
    )


def _check_attention_dp(*classes: Any) -> None:
    for one in classes:
        if getattr(one, "supports_attention_dp", False) is not True:
            raise ConfigError(
                f"{one.__name__} does not say that it does attention data parallelism; unset "
                "enable_attention_dp, or use a connector whose classes have "
                "supports_attention_dp = True."
            )


def _shut_down_parts(parts: Iterable[object]) -> None:
    """Call `shutdown` where a connector has it: the abstract classes do not, forks do."""
    for part in parts:
        shutdown = getattr(part, "shutdown", None)
        if shutdown is not None:
            shutdown()
