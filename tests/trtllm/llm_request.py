"""An engine's request, with the attributes of one version and no others; and C++'s copies of it."""

import hashlib
from pathlib import Path
from typing import Any

VOCABULARY = 997
PLACEHOLDERS = range(900, 910)
"""Tokens in whose place a model puts what it sees, if it was given something to see."""


class BoundRequest:
    """A request as C++ hands it to Python: another object at every call, of the base class.

    Source: the trampoline of `KvCacheConnectorManager` takes `LlmRequest const&`, which nanobind
    casts to a copy. It has what the bindings bind; what Python has set on the original it has not.
    """

    def __init__(self, request: "LlmRequest", bound: tuple[str, ...]) -> None:
        vars(self).update({name: getattr(request, name) for name in bound})


class LlmRequest:
    """Tokens that are seen, and those that the device has sampled but nobody has read yet."""

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
        vars(self).update(known | fields)
        self.request_id = request_id
        self.prompt_len = len(tokens)
        self.max_new_tokens = max_new_tokens
        self.is_only_prefilled = is_only_prefilled
        self.state = "CONTEXT_INIT"
        self.context_current_position = 0
        self.context_chunk_size = len(tokens)
        self.orig_prompt_len = len(tokens)
        self.salt = fields.get("cache_salt", fields.get("cache_salt_id"))
        self.tokens = list(tokens)
        """With those that were sampled and not read."""
        self.num_read = len(tokens)
        self.num_hit = 0
        self.offer: tuple[int, int, bool] | None = None
        """(start, end, whether it loads later) of what was asked ahead of time."""
        self.has_pages = False
        self.was_reported = False
        self.is_ended = False
        self.error: Exception | None = None
        if "encoder_tokens" in known:
            self.try_get_encoder_output_len = self._encoder_output_len
        self._digests = [hashlib.blake2b(repr(self._scope()).encode(), digest_size=16).digest()]

    def get_tokens(self, beam: int) -> list[int]:
        return self.tokens[: self.num_read]

    @property
    def is_parked(self) -> bool:
        return self.state == "DISAGG_GENERATION_TRANS_IN_PROGRESS"

    @property
    def is_generating(self) -> bool:
        return self.state == "GENERATION_IN_PROGRESS"

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt_len : self.num_read]

    def digest(self, position: int) -> bytes:
        """Return what a token's keys and values depend on: scope, tokens and media up to it."""
        while len(self._digests) <= position + 1:
            at = len(self._digests) - 1
            text = self._digests[-1] + self.tokens[at].to_bytes(4, "little")
            if at in (self.multimodal_positions or ()):
                text += repr(self.multimodal_hashes).encode()
            if self.tokens[at] in PLACEHOLDERS:
                text += repr(self.py_multimodal_data).encode()
            self._digests.append(hashlib.blake2b(text, digest_size=16).digest())
        return self._digests[position + 1]

    def sample(self) -> None:
        """Append the next token, which nobody has read yet."""
        digest = self.digest(len(self.tokens) - 1)
        self.tokens.append(int.from_bytes(digest[:2], "little") % VOCABULARY)

    def restart(self) -> None:
        """Begin again with all tokens as the prompt: its blocks were taken away."""
        del self.tokens[self.num_read :]
        self.max_new_tokens -= self.num_read - self.prompt_len
        self.prompt_len = self.num_read
        self.state, self.context_current_position, self.has_pages = "CONTEXT_INIT", 0, False
        self.offer, self.was_reported = None, False

    def _encoder_output_len(self) -> int | None:
        return None if self.encoder_tokens is None else len(self.encoder_tokens)

    def _scope(self) -> tuple[Any, ...]:
        """Return what all its keys and values depend on: salt, the adapter's bytes, embeddings."""
        path = self.py_lora_path
        adapter = Path(path, "adapter_model.safetensors").read_bytes() if path else None
        return (self.salt, adapter, self.prompt_embedding_table)
