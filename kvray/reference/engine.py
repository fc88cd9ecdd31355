"""The reference engine: text in, text out, over a paged pool that a connector may fill and save."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

from kvray.errors import ConfigError, KVRayError
from kvray.reference.connector_manager import KvCacheConnectorManager
from kvray.reference.engine_options import EngineOptions
from kvray.reference.engine_rank import EngineRank
from kvray.reference.inbox import Inbox, Listener
from kvray.reference.llm_args import KvConnectorConfig
from kvray.reference.output import Output, Prompt, batch_of
from kvray.reference.rank_group import start_ranks
from kvray.reference.request import LlmRequest


class Pending:
    """A submitted request: the promise of its output."""

    def __init__(self, request_id: int, future: Future[LlmRequest], engine: ReferenceEngine):
        self.request_id = request_id
        self._future = future
        self._engine = engine

    @property
    def is_done(self) -> bool:
        """Whether `result` returns at once."""
        return self._future.done()

    def when_done(self, call: Callable[[], None]) -> None:
        """Have `call` made when `result` returns at once; it must neither wait nor raise."""
        self._future.add_done_callback(lambda _: call())

    def result(self, timeout_s: float = 600.0) -> Output:
        """Wait for the output.

        Raises:
            KVRayError: the request failed, the engine died or was closed, or time is up.
        """
        try:
            request = self._future.result(timeout_s)
        except FutureTimeoutError:
            raise KVRayError(
                f"Request {self.request_id} has not ended within {timeout_s:.0f} s."
            ) from None
        return self._engine.output_of(request)


class ReferenceEngine:
    """One replica: model, pool, executor and, if asked for, a connector.

    Args:
        model: `smollm2`, `tiny`, `tiny:SEED`, or the path of a Llama-family checkpoint (a
            directory or a .gguf file).
        tokens_per_block: tokens in a block, and rows in every step of the model.
        num_blocks: blocks in the pool.
        connector: where the connector's classes are; an object with the three attributes of
            `KvConnectorConfig`.
        chunk_tokens: with `enable_chunked_prefill`, the longest piece of a prompt in one pass.
        overlap: sample one pass late, as TensorRT-LLM does by default.
        pad_batch_size: fill smaller batches up with dummy requests.
        poison: make every byte that nobody wrote NaN.
        cache_dir: where downloaded weights are kept.
        num_threads: torch's threads on each rank; equal answers need equal numbers.
        tensor_parallel_size: ranks that share the model, 1, 2 or 4: this process and children
            that end with it, each with a pool and a worker of its own.
        enable_attention_dp: the ranks share the requests instead: each runs its own, dealt
            round-robin, over whole weights (TensorRT-LLM keeps a dense MLP whole then, too).
        collective_timeout_s: how late one rank may be before all others fail.
        runtime: the line of TensorRT-LLM to follow where they differ, `1.2` or `main`.
        ranks_per_node: how many ranks a node has, as the connector is told; None: not said.
        rank_env: for each rank from 1 on its variables besides those of this process, such as
            those that lead to another node's tier.

    Raises:
        ConfigError: an argument, the model or the connector cannot be used.
        KVRayError: the connector, or another rank, failed while the engine started.
    """

    def __init__(
        self,
        model: str | Path = "smollm2",
        *,
        tokens_per_block: int = 32,
        num_blocks: int = 128,
        connector: KvConnectorConfig | Any | None = None,
        enable_block_reuse: bool = True,
        enable_partial_reuse: bool = False,
        enable_chunked_prefill: bool = False,
        chunk_tokens: int | None = None,
        overlap: bool = False,
        max_batch_size: int = 8,
        pad_batch_size: int = 0,
        poison: bool = False,
        cache_dir: Path | None = None,
        num_threads: int = 2,
        tensor_parallel_size: int = 1,
        enable_attention_dp: bool = False,
        collective_timeout_s: float = 60.0,
        runtime: str = "1.2",
        ranks_per_node: int | None = None,
        rank_env: Sequence[Mapping[str, str]] = (),
    ) -> None:
        options = EngineOptions(
            model=model,
            tokens_per_block=tokens_per_block,
            num_blocks=num_blocks,
            connector=connector,
            enable_block_reuse=enable_block_reuse,
            enable_partial_reuse=enable_partial_reuse,
            enable_chunked_prefill=enable_chunked_prefill,
            chunk_tokens=chunk_tokens,
            overlap=overlap,
            max_batch_size=max_batch_size,
            pad_batch_size=pad_batch_size,
            poison=poison,
            cache_dir=cache_dir,
            num_threads=num_threads,
            tensor_parallel_size=tensor_parallel_size,
            enable_attention_dp=enable_attention_dp,
            collective_timeout_s=collective_timeout_s,
            runtime=runtime,
            ranks_per_node=ranks_per_node,
            rank_env=rank_env,
        )
        self._request_ids = itertools.count(1)
        self._ids_lock = threading.Lock()
        self._inbox = Inbox()
        ranks, self._others = start_ranks(options)
        try:
            self._leader = EngineRank(options, ranks, self._inbox)
        except BaseException:
            ranks.leave()
            self._others.kill()
            raise
        self.tokenizer = self._leader.tokenizer
        self.model = self._leader.model
        self.llm_args = self._leader.llm_args
        self.cache = self._leader.cache
        self._executor = self._leader.executor
        self._executor.start()

    def __enter__(self) -> ReferenceEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def connector(self) -> KvCacheConnectorManager | None:
        """This rank's connector, until the engine is closed."""
        return self._leader.connector

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """The processes of the other ranks, from rank 1 on."""
        return self._others.pids

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine, or None while it lives."""
        return self._executor.failure

    @property
    def failure_traceback(self) -> str:
        """Where the failure was raised, as text."""
        return self._executor.failure_traceback

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
    ) -> Pending:
        """Queue one prompt and return at once.

        Args:
            prompt: text or token ids.
            max_tokens: the longest answer.
            salt: keeps its blocks from those with another salt.
            listener: hears of the answer's tokens as they come; with `enable_attention_dp` of all
                of them at the end.

        Raises:
            ConfigError: the prompt is empty, has ids that the model does not know, or does not
                fit into the pool or the model with its answer.
            KVRayError: the engine is dead or closed.
        """
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check(tokens, max_tokens)
        with self._ids_lock:
            request_id = next(self._request_ids)
        request = LlmRequest(
            request_id,
            tokens,
            max_new_tokens=max_tokens,
            end_ids=self.tokenizer.end_ids,
            cache_salt=salt,
        )
        future = self._inbox.submit(
            request, closed_error=self._executor.closed_error, listener=listener
        )
        return Pending(request_id, future, self)

    def cancel(self, pending: Pending) -> None:
        """End a request early; its result is what it has so far, with reason `cancelled`."""
        self._inbox.cancel(pending.request_id)

    def close(self) -> None:
        """Stop the executors, then let the connectors and the other ranks go. Twice is fine."""
        self._inbox.stop()
        try:
            self._executor.join()
        except BaseException:
            self._others.kill()
            raise
        finally:
            self._leader.shut_down()
        self._others.close(has_failed=self.failure is not None)

    def output_of(self, request: LlmRequest) -> Output:
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
        )

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
        total = len(tokens) + max_tokens
        room = self.cache.get_max_resource_count() * self.cache.tokens_per_block
        if total > min(room, self.model.max_tokens):
            raise ConfigError(
                f"A prompt of {len(tokens)} tokens and {max_tokens} more do not fit: the pool "
                f"holds {room} tokens and the model takes {self.model.max_tokens}."
            )
