"""Bringing an engine up in TensorRT-LLM's order: constructors, warm-up, and only then the pool."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from kvray.errors import ConfigError
from kvray.reference.cache_manager import KVCacheManager
from kvray.reference.connector_manager import KvCacheConnectorManager
from kvray.reference.llm_args import LlmArgs
from kvray.reference.model import BlockModel
from kvray.reference.model_engine import ModelEngine
from kvray.reference.ranks import Ranks


def bring_up(
    llm_args: LlmArgs,
    model: BlockModel,
    cache: KVCacheManager,
    *,
    ranks: Ranks,
    pad_batch_size: int = 0,
) -> tuple[ModelEngine, KvCacheConnectorManager | None]:
    """Return what runs passes, and the connector if `llm_args` names one.

    Every rank builds a worker, and the leader a scheduler; with attention data parallelism every
    rank builds both, and none talks to the others about them.

    The forward callable fires in the warm-up, when the worker has no pool and no metadata yet.

    Raises:
        ConfigError: the connector's classes cannot be found, or do not do attention data
            parallelism and are asked to.
        Exception: whatever the connector raises; a start-up fails with it, as upstream.
    """
    connector = None
    if llm_args.kv_connector_config is not None:
        connector = _make_connector(llm_args, ranks)
    try:
        callable_ = None
        if connector is not None:
            callable_ = connector.worker.register_forward_pass_callable()
        model_engine = ModelEngine(
            model, cache, forward_callable=callable_, pad_batch_size=pad_batch_size
        )
        model_engine.warm_up()
        if connector is not None:
            connector.worker.register_kv_caches(cache.get_unique_primary_pool())
            model_engine.install_hooks(connector)
            connector.wait_for_initialization()
            cache.connector = connector
    except BaseException:
        shut_down(connector)
        raise
    return model_engine, connector


def shut_down(connector: KvCacheConnectorManager | None) -> None:
    """Call `shutdown` where a connector has it: the abstract classes do not, forks do."""
    if connector is not None:
        _shut_down_parts((connector.worker, connector.scheduler))


def _make_connector(llm_args: LlmArgs, ranks: Ranks) -> KvCacheConnectorManager:
    """Build worker and scheduler at the same time on two threads, as upstream does."""
    scheduler_class, worker_class = _find_classes(llm_args.kv_connector_config)
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


def _find_classes(config: Any) -> tuple[Any, Any]:
    try:
        module = importlib.import_module(config.connector_module)
        return (
            getattr(module, config.connector_scheduler_class),
            getattr(module, config.connector_worker_class),
        )
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"The connector {config.connector_module!r} cannot be used: {error}."
        ) from error


def _shut_down_parts(parts: Iterable[object]) -> None:
    for part in parts:
        shutdown = getattr(part, "shutdown", None)
        if shutdown is not None:
            shutdown()
