"""A request and the batch of a pass; their names are those of TensorRT-LLM's `LlmRequest`."""

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvray.errors import KVRayError


class LlmRequestState(enum.Enum):
    """The phase of a request; it is not scheduled while its blocks are transferred."""

    CONTEXT_INIT = enum.auto()
    GENERATION_IN_PROGRESS = enum.auto()
    GENERATION_TO_COMPLETE = enum.auto()
    GENERATION_COMPLETE = enum.auto()
    DISAGG_CONTEXT_TRANS_IN_PROGRESS = enum.auto()


class LlmRequest:
    """One prompt, the tokens generated after it, and the progress of its context phase.

    Sampling is greedy: tokens, `max_new_tokens` and the ids that end it describe a request fully.
    Only the executor's thread changes a request after its submission.
    """

    def __init__(
        self,
        request_id: int,
        prompt_tokens: Sequence[int],
        *,
        max_new_tokens: int = 16,
        end_ids: frozenset[int] = frozenset(),
        cache_salt: str | None = None,
        is_dummy: bool = False,
    ) -> None:
        self.request_id = request_id
        self.prompt_len = self.orig_prompt_len = len(prompt_tokens)
        self.max_new_tokens = max_new_tokens
        self.end_ids = end_ids
        self.cache_salt = cache_salt
        self.cache_salt_id: int | None = None
        if cache_salt is not None:
            digest = hashlib.blake2b(
                cache_salt.encode(errors="surrogatepass"), digest_size=8
            ).digest()
            self.cache_salt_id = int.from_bytes(digest, "little")
        self.is_dummy = is_dummy
        self.state = LlmRequestState.CONTEXT_INIT
        self.finish_reason: str | None = None
        self.context_chunk_size = self.prompt_len
        self.prepopulated_prompt_len = 0
        self.py_num_connector_matched_tokens = 0
        self.reused_tokens = 0
        self.is_admitted = False
        self.submitted_at = 0.0
        self.first_token_at = 0.0
        self.num_computed_tokens = 0
        self.py_draft_tokens: list[int] = []
        """What the coming pass tries after the newest token; no part of the tokens."""
        self.py_num_accepted_draft_tokens = 0
        """How many of them, from the first on, the last pass has confirmed."""
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.context_current_position = 0
        """The number of prompt tokens with their KV in the pool."""
        self._tokens = list(prompt_tokens)

    def get_tokens(self, beam: int = 0) -> list[int]:
        """Return a copy of all tokens so far, the prompt's first."""
        assert beam == 0, "there is one beam"
        return list(self._tokens)

    @property
    def generated_tokens(self) -> list[int]:
        return self._tokens[self.prompt_len :]

    @property
    def context_remaining_length(self) -> int:
        return self.prompt_len - self.context_current_position

    @property
    def is_first_context_chunk(self) -> bool:
        return self.context_current_position == self.prepopulated_prompt_len

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def set_prepopulated_prompt_len(self, num_tokens: int, tokens_per_block: int) -> None:
        """Begin the context phase after `num_tokens`, with chunks that end where a block ends.

        Source: `LlmRequest::setPrepopulatedPromptLen`, which ends the engine where this raises.
        """
        if num_tokens >= self.prompt_len:
            raise KVRayError(
                f"Request {self.request_id}: {num_tokens} tokens were offered for a prompt of "
                f"{self.prompt_len}. There must be at least one uncomputed token, so offer at "
                "most the full blocks of all tokens but the last."
            )
        self.prepopulated_prompt_len = self.context_current_position = num_tokens
        self.num_computed_tokens = num_tokens
        chunk_end = num_tokens + self.context_chunk_size
        if chunk_end < self.prompt_len:
            chunk_end = chunk_end // tokens_per_block * tokens_per_block
            self.context_chunk_size = chunk_end - num_tokens
        else:
            self.context_chunk_size = self.context_remaining_length

    def move_to_next_context_chunk(self) -> None:
        self.context_current_position += min(self.context_chunk_size, self.context_remaining_length)
        self.num_computed_tokens = self.context_current_position

    def add_sampled(self, token: int) -> None:
        """Append the accepted drafts and the token after them, up to one that ends the request."""
        drafts = self.py_draft_tokens
        self.drafted_tokens += len(drafts)
        for draft in drafts[: self.py_num_accepted_draft_tokens]:
            self.add_new_token(draft)
            self.accepted_tokens += 1
            if self.is_finished:
                return
        self.add_new_token(token)

    def add_new_token(self, token: int) -> None:
        self._tokens.append(token)
        if token in self.end_ids:
            self.finish_by_reason("stop")
        elif len(self._tokens) - self.prompt_len >= self.max_new_tokens:
            self.finish_by_reason("length")

    def finish_by_reason(self, reason: str) -> None:
        """End the request: `stop`, `length`, `cancelled` or `error`."""
        self.finish_reason = reason
        self.state = LlmRequestState.GENERATION_COMPLETE


@dataclass(slots=True)
class ScheduledRequests:
    """The requests of one pass: those in their context phase and those that generate."""

    context_requests: list[LlmRequest] = field(default_factory=list)
    generation_requests: list[LlmRequest] = field(default_factory=list)

    @property
    def batch_size(self) -> int:
        return len(self.context_requests) + len(self.generation_requests)

    def all_requests(self) -> list[LlmRequest]:
        return self.context_requests + self.generation_requests

    def count_computed(self) -> None:
        """Move every request on by the tokens that the pass has computed."""
        for request in self.context_requests:
            request.move_to_next_context_chunk()
            if request.context_remaining_length == 0 and not request.is_finished:
                request.state = LlmRequestState.GENERATION_IN_PROGRESS
        for request in self.generation_requests:
            request.num_computed_tokens += 1 + request.py_num_accepted_draft_tokens

    def foresee_ends(self) -> None:
        """Stop scheduling requests that end with the token that is sampled but not added."""
        for request in self.all_requests():
            is_last = len(request.generated_tokens) + 1 >= request.max_new_tokens
            if is_last and request.state is LlmRequestState.GENERATION_IN_PROGRESS:
                request.state = LlmRequestState.GENERATION_TO_COMPLETE
