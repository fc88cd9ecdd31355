"""A request of the reference engine's, with the attributes of one version beside its own."""

import hashlib
from pathlib import Path
from typing import Any

from kvray.reference import request as reference

VOCABULARY = 997
PLACEHOLDERS = range(900, 910)
"""Tokens in whose place a model puts what it sees, if it was given something to see."""
ENDS = frozenset(range(0, VOCABULARY, 16))
"""Tokens that end an answer early."""


class LlmRequest(reference.LlmRequest):
    """Its answer follows from what it depends on, so its future tokens can be told."""

    def __init__(
        self,
        request_id: int,
        tokens: list[int],
        *,
        known: dict[str, Any],
        max_new_tokens: int,
        is_only_prefilled: bool = False,
        **fields: Any,
    ) -> None:
        """`is_only_prefilled`: another server gets its blocks, and generates."""
        assert set(fields) <= set(known), f"this version has no {set(fields) - set(known)}"
        max_new_tokens = 1 if is_only_prefilled else max_new_tokens
        super().__init__(request_id, tokens, max_new_tokens=max_new_tokens, end_ids=ENDS)
        vars(self).update(known | fields)
        self.is_only_prefilled = is_only_prefilled
        self.num_hit = 0
        self.offer: tuple[int, int] | None = None
        """(start, end) of what was asked about ahead of time."""
        self.has_pages = False
        self.was_reported = False
        self._all_tokens = list(tokens)
        self._digests = [hashlib.blake2b(repr(self._scope(fields)).encode()).digest()]

    @property
    def is_in_context(self) -> bool:
        return self.state is reference.LlmRequestState.CONTEXT_INIT

    def token_at(self, position: int) -> int:
        """Return a token, also one that has not been sampled yet."""
        while len(self._all_tokens) <= position:
            digest = self.digest(len(self._all_tokens) - 1)
            self._all_tokens.append(int.from_bytes(digest[:2], "little") % VOCABULARY)
        return self._all_tokens[position]

    def digest(self, position: int) -> bytes:
        """Return what a token's keys and values depend on: scope, tokens and media up to it."""
        while len(self._digests) <= position + 1:
            at = len(self._digests) - 1
            text = self._digests[-1] + self.token_at(at).to_bytes(4, "little")
            if at in (getattr(self, "multimodal_positions", None) or ()):
                text += repr(self.multimodal_hashes).encode()
            if self.token_at(at) in PLACEHOLDERS:
                text += repr(self.py_multimodal_data).encode()
            self._digests.append(hashlib.blake2b(text, digest_size=16).digest())
        return self._digests[position + 1]

    def draft(self, count: int, num_right: int) -> None:
        """Have the coming pass try `count` tokens, the first `num_right` of them right."""
        first = len(self.get_tokens(0))
        right = [self.token_at(first + index) for index in range(num_right)]
        wrong = (self.token_at(first + num_right) + 1) % VOCABULARY
        self.py_draft_tokens = right + [wrong] * (count - num_right)

    def restart(self) -> None:
        """Begin again with all tokens as the prompt: its blocks were taken away."""
        self.max_new_tokens -= len(self.generated_tokens)
        self.prompt_len += len(self.generated_tokens)
        self.state = reference.LlmRequestState.CONTEXT_INIT
        self.context_current_position = self.num_computed_tokens = 0
        self.has_pages = self.was_reported = self.is_admitted = False
        self.offer = None

    def try_get_encoder_output_len(self) -> int | None:
        tokens = getattr(self, "encoder_tokens", None)
        return None if tokens is None else len(tokens)

    def _scope(self, fields: dict[str, Any]) -> tuple[Any, ...]:
        """Return what all its keys and values depend on: salt, the adapter's bytes, embeddings."""
        path = self.py_lora_path
        adapter = Path(path, "adapter_model.safetensors").read_bytes() if path else None
        salt = fields.get("cache_salt", fields.get("cache_salt_id"))
        return (salt, adapter, self.prompt_embedding_table)
