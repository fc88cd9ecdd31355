"""The choice of the coming batch, and its pages and loads.

With one pool the connector is asked when a request gets its pages, and all of its offer is taken.
With layer groups it is asked apart from that, some of the offer may be taken, and pages come with
each chunk; one version asks ahead, for requests that are then left out of the batch.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from tests.trtllm.cache import Cache
from tests.trtllm.llm_request import LlmRequest
from tests.trtllm.shapes import BLOCK


class Admission:
    """The requests of one engine, from those that wait to those that are being saved."""

    def __init__(
        self,
        stand_in: ModuleType,
        manager: Any,
        cache: Cache,
        *,
        has_groups: bool,
        chunk: int | None,
        max_batch: int,
        draft_len: int = 0,
    ) -> None:
        self.waiting: list[LlmRequest] = []
        self.active: list[LlmRequest] = []
        self.pinned: list[LlmRequest] = []
        self.dummy: LlmRequest | None = None
        """Pads every batch that generates."""
        self.accept: Callable[[LlmRequest, int], int] = lambda _request, offer: offer
        """Returns how many tokens of an offer the engine takes."""
        self.defers: Callable[[LlmRequest], bool] = lambda _request: False
        """Says whether a request that was asked about ahead is left out of the batch."""
        self._manager = manager
        self._cache = cache
        self._has_groups = has_groups
        self._resolves_late = stand_in.RESOLVES_LATE and has_groups
        self._chunk = chunk
        self._max_batch = max_batch
        self._draft_len = draft_len

    def schedule(self) -> tuple[list[LlmRequest], list[LlmRequest]]:
        """Return those that compute of their prompts, and those that generate."""
        while self.waiting and len(self.active) < self._max_batch and self._fits(self.waiting[0]):
            self.active.append(self.waiting.pop(0))
        context = [one for one in self.active if one.state == "CONTEXT_INIT"]
        generation = [one for one in self.active if one.is_generating]
        if self._resolves_late:
            context = [one for one in context if self._ask_ahead(one)]
        for request in context:
            left = request.prompt_len - request.context_current_position
            request.context_chunk_size = min(left, self._chunk or left)
        if generation and self.dummy is not None:
            generation.append(self.dummy)
        return context, generation

    def _fits(self, request: LlmRequest) -> bool:
        """Whether all that are active could run to their ends beside it, sharing nothing."""
        everyone = [*self.active, *self.pinned, request]
        most = [one.prompt_len + one.max_new_tokens + 1 + 2 * self._draft_len for one in everyone]
        return sum(-(-tokens // BLOCK) for tokens in most) <= self._cache.num_pages - 1

    def _ask_ahead(self, request: LlmRequest) -> bool:
        """Ask once, and perhaps leave the request out; what was offered waits meanwhile."""
        if request.has_pages:
            return True
        if request.offer is None and self._is_asked_about(request):
            local = self._open(request)
            count, is_async = self._manager.query(request, local)
            request.offer = (local, local + count, is_async)
        return not self.defers(request)

    def prepare(self, context: list[LlmRequest]) -> None:
        """Give first chunks their pages, and ask what can be loaded into them."""
        for request in context:
            if not request.has_pages and self._manager.should_add_sequence(request):
                self._add(request)
            elif self._has_groups:
                start = request.context_current_position
                end = start + request.context_chunk_size
                self._cache.extend(request, end, history=start)
        for request in self.active:
            if request.is_generating:
                position = len(request.tokens) - 1
                self._cache.extend(request, position + 1 + self._draft_len, history=position)

    def _add(self, request: LlmRequest) -> None:
        """Give a request its first pages, with what is taken of an offer."""
        take = self._take_some if self._has_groups else self._take_all
        local, taken = take(request)
        start = local + taken
        assert start < request.prompt_len, "at least one token is computed"
        request.context_current_position = start
        left = request.prompt_len - start
        request.context_chunk_size = min(left, self._chunk or left)
        if self._has_groups:
            self._cache.extend(request, start + request.context_chunk_size, history=start)
        request.has_pages, request.num_hit = True, taken
        self._manager.update_state_after_alloc(request, self._cache.pages_of(request))

    def _take_all(self, request: LlmRequest) -> tuple[int, int]:
        """Return how many tokens the engine has itself, and how many of the offer it takes."""
        local = self._open(request)
        self._cache.extend(request, request.prompt_len, history=0)
        taken = self._manager.get_num_new_matched_tokens(request, local)
        return local, taken if self._cache.is_reused else 0  # asked, and then not heard

    def _take_some(self, request: LlmRequest) -> tuple[int, int]:
        """As `_take_all`, with an offer of which the engine may take less."""
        is_asked = self._is_asked_about(request)
        if request.offer is None:
            local = self._open(request)
            count, is_async = self._manager.query(request, local) if is_asked else (0, False)
            request.offer = (local, local + count, is_async)
        local, end, is_async = request.offer
        if not is_asked:
            return local, 0
        taken = self.accept(request, end - local) if self._cache.is_reused else 0
        if self._resolves_late and taken < end - local:
            self._manager.cancel_load(request, local + taken, end)
        self._manager.commit(request, taken, is_async)
        return local, taken

    def _open(self, request: LlmRequest) -> int:
        if request.request_id in self._cache:
            return request.context_current_position
        request.context_current_position = self._cache.add(request)
        return request.context_current_position

    def _is_asked_about(self, request: LlmRequest) -> bool:
        return not request.is_generation_only_request
