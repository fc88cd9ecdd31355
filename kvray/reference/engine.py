"""The reference engine: text in, text out, over a paged pool that a connector may fill and save.

It starts in TensorRT-LLM's order: constructors, warm-up, and only then the pool. Run as a module it
is one of several ranks, whose leader starts it.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kvray.errors import ConfigError
from kvray.reference.cache_manager import KVCacheManager
from kvray.reference.checkpoint import Checkpoint, load_checkpoint
from kvray.reference.child_process import PipeClosed, join_parent
from kvray.reference.connector_manager import KvCacheConnectorManager
from kvray.reference.engine_options import EngineOptions
from kvray.reference.executor import Executor
from kvray.reference.intake import Intake
from kvray.reference.model_engine import ModelEngine
from kvray.reference.output import Call, Listener, Output, Prompt, batch_of
from kvray.reference.ranks import Ranks, start_ranks
from kvray.reference.request import LlmRequest

_TASK_TIMEOUT_S = 30.0
_START_TIMEOUT_S = 300.0
"""How much longer one rank may take than another to start and to load its model."""


class ReferenceEngine:
    """One replica: model, pool, executor and, if asked for, a connector; see `EngineOptions`.

    Of several ranks each has one, in its own process; the leader's takes the requests. Each has a
    scheduler with attention data parallelism, otherwise only the leader has one. The start fails
    with the connector's own error, as upstream. A ConfigError says which argument, model or
    connector cannot be used, a KVRayError that another rank failed.
    """

    def __init__(
        self, model: str | Path = "smollm2", *, ranks: Ranks | None = None, **options: Any
    ) -> None:
        """Start; with `ranks` as that rank, which the caller has `run`."""
        self._options = EngineOptions(model=model, **options)
        torch.set_num_threads(self._options.num_threads)
        self._request_ids = itertools.count(1)
        self.connector: KvCacheConnectorManager | None = None
        """This rank's connector, until the engine is closed."""
        self._ranks = start_ranks(self._options) if ranks is None else ranks
        try:
            self._load_parts()
        except BaseException:
            self._shut_down()
            self._ranks.kill()
            raise
        if ranks is None:
            self._executor.start()

    def _load_parts(self) -> None:
        options, ranks = self._options, self._ranks
        checkpoint = self._load(options.model)
        self.tokenizer = checkpoint.tokenizer
        self.model = checkpoint.model
        self.llm_args = _llm_args(options, ranks, checkpoint.name)
        self.cache = KVCacheManager(self.model.geometry, options)
        ranks.meet(timeout_s=_START_TIMEOUT_S)
        if options.connector is not None:
            self.connector = _make_connector(self.llm_args, ranks)
        model_engine = self._warm_up()
        ranks.meet(timeout_s=_START_TIMEOUT_S)
        self._intake = Intake(ranks, self._output_of, is_dealt=options.enable_attention_dp)
        self._executor = Executor(
            model_engine,
            self.cache,
            self._intake,
            options,
            self.connector,
            lambda model: self._load(model).model,
        )

    def __enter__(self) -> ReferenceEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """The processes of the other ranks, from rank 1 on."""
        return self._ranks.pids

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine, or None while it lives."""
        return self._executor.failure

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_tokens: int = 16,
        salt: str | None = None,
        timeout_s: float = 600.0,
    ) -> Any:
        """Answer one prompt (text or token ids) with an `Output`, or a list with a list of them.

        The prompts of a list are in flight at once.
        """
        batch, is_single = batch_of(prompts)
        pending = [self.submit(prompt, max_tokens=max_tokens, salt=salt) for prompt in batch]
        outputs = [item.result(timeout_s) for item in pending]
        return outputs[0] if is_single else outputs

    def submit(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 16,
        salt: str | None = None,
        listener: Listener | None = None,
    ) -> Call:
        """Queue one prompt, text or token ids, and return at once.

        Args:
            prompt: text or token ids.
            max_tokens: the longest answer.
            salt: prompts with another salt cannot use its blocks.
            listener: hears new tokens; with `enable_attention_dp`, all of them at the end.

        Raises:
            ConfigError: the prompt is unusable, or does not fit with its answer.
            KVRayError: the engine is dead or closed.
        """
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check(tokens, max_tokens)
        request = LlmRequest(
            next(self._request_ids),
            tokens,
            max_new_tokens=max_tokens,
            end_ids=self.tokenizer.end_ids,
            cache_salt=salt,
        )
        return self._intake.submit(request, listener=listener)

    def get_kv_cache_events(self) -> list[dict[str, Any]]:
        """Return the events of the pool since the last call, as TensorRT-LLM has them."""
        return self.cache.get_latest_events()

    def cancel(self, call: Call) -> None:
        """End a request early; its result has the tokens so far and the reason `cancelled`."""
        self._intake.cancel(call.call_id)

    def update_weights(self, model: str | Path, *, timeout_s: float = 600.0) -> None:
        """Go on with the weights of `model`, of the same shape, once all requests have ended.

        The engine's own prefix cache is emptied with it; no connector is told. Later requests wait
        for the new weights. One call at a time, and not with `enable_attention_dp`, whose ranks end
        their requests at different times.
        """
        if self._options.enable_attention_dp:
            raise ConfigError("The weights of ranks with enable_attention_dp cannot be replaced.")
        self._intake.update_weights(str(model)).result(timeout_s)

    def reset_prefix_cache(self, *, timeout_s: float = 600.0) -> None:
        """Forget the blocks of earlier requests, once all requests have ended; see above."""
        self.update_weights("", timeout_s=timeout_s)

    def run(self) -> None:
        """Serve as a rank besides the leader, until that ends or `failure` has an error."""
        self._executor.run()
        if self.failure is not None:
            self._ranks.fail(self.failure)
        self._shut_down()

    def close(self) -> None:
        """Stop the executors, then let the connectors and the other ranks go. Twice is fine."""
        self._intake.stop()
        try:
            self._executor.join()
        except BaseException:
            self._ranks.kill()
            raise
        finally:
            self._shut_down()
        self._ranks.close(has_failed=self.failure is not None)

    def _check(self, tokens: list[int], max_tokens: int) -> None:
        if not tokens:
            raise ConfigError("The prompt is empty; give it at least one token.")
        if max_tokens < 1:
            raise ConfigError(f"max_tokens is {max_tokens}; it must be at least 1.")
        for token in tokens:
            if not (type(token) is int and 0 <= token < self.model.vocab_size):
                raise ConfigError(
                    f"{token!r} is no token id; ids are integers from 0 to "
                    f"{self.model.vocab_size - 1}."
                )
        num_drafts = self._options.max_draft_len
        total = len(tokens) + max_tokens + num_drafts
        room = self.cache.get_max_resource_count() * self.cache.tokens_per_block
        if total > min(room, self.model.max_tokens):
            drafts = f", {num_drafts} of them drafts," if num_drafts else ""
            raise ConfigError(
                f"A prompt of {len(tokens)} tokens and {total - len(tokens)} more{drafts} do not "
                f"fit: the pool holds {room} tokens and the model takes {self.model.max_tokens}."
            )

    def _shut_down(self) -> None:
        """Let the connector go. Twice is fine."""
        connector, self.connector = self.connector, None
        if connector is not None:
            _shut_down_parts((connector.worker, connector.scheduler))

    def _load(self, model: str | Path) -> Checkpoint:
        options = self._options
        return load_checkpoint(
            model,
            tokens_per_step=options.blocks_per_step * options.tokens_per_block,
            split_over=self._ranks if options.is_split else None,
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
    for one in (scheduler_class, worker_class) if is_owner else ():
        if getattr(one, "supports_attention_dp", False) is not True:
            raise ConfigError(
                f"{one.__name__} does not say that it does attention data parallelism; unset "
                "enable_attention_dp, or use a connector whose classes have "
                "supports_attention_dp = True."
            )
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


def _shut_down_parts(parts: Iterable[object]) -> None:
    """Call `shutdown` where a connector has it: the abstract classes do not, forks do."""
    for part in parts:
        shutdown = getattr(part, "shutdown", None)
        if shutdown is not None:
            shutdown()


def main() -> None:
    """Be the rank that the leader names, until the leader stops or ends, or something fails."""
    pipe = join_parent()
    try:
        rank, options = pipe.receive(timeout_s=_TASK_TIMEOUT_S)
    except PipeClosed:
        sys.exit(1)
    size, timeout_s = options.tensor_parallel_size, options.collective_timeout_s
    ranks = Ranks(rank, size, leader=pipe, timeout_s=timeout_s)
    given = {field.name: getattr(options, field.name) for field in fields(options)}
    try:
        engine = ReferenceEngine(ranks=ranks, **given)
    except Exception as error:  # noqa: BLE001 (the process's end: the leader is told any cause)
        ranks.fail(error)
        sys.exit(1)
    engine.run()
    sys.exit(0 if engine.failure is None else 1)


if __name__ == "__main__":
    main()
