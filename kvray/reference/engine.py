"""The reference engine: text in, text out, over a paged pool that a connector may fill and save."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvray.errors import ConfigError
from kvray.reference.connector_manager import KvCacheConnectorManager
from kvray.reference.engine_options import EngineOptions
from kvray.reference.engine_rank import EngineRank
from kvray.reference.output import Call, Listener, Prompt, batch_of
from kvray.reference.ranks import start_ranks
from kvray.reference.request import LlmRequest


class ReferenceEngine:
    """One replica: model, pool, executor and, if asked for, a connector; see `EngineOptions`.

    A ConfigError says which argument, model or connector cannot be used, a KVRayError that the
    connector or another rank failed while the engine started.
    """

    def __init__(self, model: str | Path = "smollm2", **options: Any) -> None:
        self._request_ids = itertools.count(1)
        chosen = EngineOptions(model=model, **options)
        self._max_draft_len = chosen.max_draft_len
        self._ranks = start_ranks(chosen)
        try:
            self._leader = EngineRank(chosen, self._ranks)
        except BaseException:
            self._ranks.kill()
            raise
        self.tokenizer = self._leader.tokenizer
        self.model = self._leader.model
        self.llm_args = self._leader.llm_args
        self.cache = self._leader.cache
        self._intake = self._leader.intake
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

    @property
    def tokens_per_block(self) -> int:
        return self.cache.tokens_per_block

    def cancel(self, call: Call) -> None:
        """End a request early; its result has the tokens so far and the reason `cancelled`."""
        self._intake.cancel(call.call_id)

    def update_weights(self, model: str | Path, *, timeout_s: float = 600.0) -> None:
        """Go on with the weights of `model`, of the same shape, once all requests have ended.

        The engine's own prefix cache is emptied with it; no connector is told. Later requests wait
        for the new weights. One call at a time, and not with `enable_attention_dp`, whose ranks end
        their requests at different times.
        """
        if self.llm_args.enable_attention_dp:
            raise ConfigError("The weights of ranks with enable_attention_dp cannot be replaced.")
        self._intake.update_weights(str(model)).result(timeout_s)

    def reset_prefix_cache(self, *, timeout_s: float = 600.0) -> None:
        """Forget the blocks of earlier requests, once all requests have ended; see above."""
        self.update_weights("", timeout_s=timeout_s)

    def close(self) -> None:
        """Stop the executors, then let the connectors and the other ranks go. Twice is fine."""
        self._intake.stop()
        try:
            self._executor.join()
        except BaseException:
            self._ranks.kill()
            raise
        finally:
            self._leader.shut_down()
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
        total = len(tokens) + max_tokens + self._max_draft_len
        room = self.cache.get_max_resource_count() * self.cache.tokens_per_block
        if total > min(room, self.model.max_tokens):
            drafts = f", {self._max_draft_len} of them drafts," if self._max_draft_len else ""
            raise ConfigError(
                f"A prompt of {len(tokens)} tokens and {total - len(tokens)} more{drafts} do not "
                f"fit: the pool holds {room} tokens and the model takes {self.model.max_tokens}."
            )
