"""The model of an engine: reads all that a token attends to, checks it, and writes its own rows."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

from tests.trtllm.cache import Cache
from tests.trtllm.llm_request import LlmRequest
from tests.trtllm.memory import Memory
from tests.trtllm.shapes import BLOCK


class Model:
    """All its ranks; `corrupt_rows` counts what was read wrongly, or written where it must not."""

    def __init__(
        self,
        workers: Sequence[Any],
        memories: Sequence[Memory],
        cache: Cache,
        *,
        has_hooks: bool,
        has_groups: bool,
        draft_len: int = 0,
    ) -> None:
        """`draft_len`: tokens that are drafted after each one that is computed for an answer."""
        self.corrupt_rows = 0
        self.num_accepted = 0
        self._draft_len = draft_len
        self._accepts = random.Random(draft_len)
        self.num_passes = 0
        self._workers = workers
        self._memories = memories
        self._cache = cache
        self._has_hooks = has_hooks
        self._has_groups = has_groups
        groups = memories[0].shape.groups
        self._layers = sorted(layer for group in groups for layer in group.layers)

    def expect_loads(self, context: list[LlmRequest]) -> None:
        """Check that what was promised to first chunks is there, and nothing else has changed."""
        for request in context:
            if request.num_hit and request.state == "CONTEXT_INIT":
                end = request.context_current_position
                self.expect(request, (end - request.num_hit) // BLOCK, end)
        self._check()

    def forward(self, context: list[LlmRequest], generation: list[LlmRequest]) -> None:
        """Do a pass with the hooks around it; a dummy computes nothing that anybody reads."""
        generation = [one for one in generation if not one.is_dummy_request]
        self.num_passes += 1
        layers = self._layers if self._has_hooks and context else ()
        for layer, worker in itertools.product(layers, self._workers):
            worker.wait_for_layer_load(layer, None)
        for request in context:
            start = request.context_current_position
            self._compute(request, start, start + request.context_chunk_size)
        for request in generation:
            self._compute(request, len(request.tokens) - 1, len(request.tokens))
            if self._draft_len:
                self._compute_drafts(request)
        for layer, worker in itertools.product(layers, self._workers):
            worker.save_kv_layer(layer, None)
        for worker in self._workers:
            worker.wait_for_save(None)
        self._check()
        for request in context:
            request.context_current_position += request.context_chunk_size
            if request.context_current_position == request.prompt_len:
                request.state = "GENERATION_IN_PROGRESS"
        for request in (*context, *generation):
            if self._has_groups:
                is_last = request.is_generating
                done = len(request.tokens) if is_last else request.context_current_position
                self._cache.pass_windows(request, done)
            if request.is_generating:
                request.sample()

    def read(self, request: LlmRequest, end: int) -> None:
        """Read all that a token at `end` attends to."""
        for memory in self._memories:
            for group, pages in enumerate(self._cache.pages_of(request)):
                for block in range(self._cache.first_live(group, end), -(-end // BLOCK)):
                    self.corrupt_rows += memory.corrupt_rows(
                        request, group, block, pages[block], end
                    )

    def _compute(self, request: LlmRequest, start: int, end: int) -> None:
        """Read all that the tokens from `start` to `end` attend to, and write them."""
        self.read(request, start)
        for memory in self._memories:
            for group, pages in enumerate(self._cache.pages_of(request)):
                for block in range(start // BLOCK, -(-end // BLOCK)):
                    memory.compute(request, group, block, pages[block], start, end)

    def _compute_drafts(self, request: LlmRequest) -> None:
        """Compute the drafted tokens, of which some turn out to be those of the answer."""
        end = len(request.tokens) + self._draft_len
        for _ in range(self._accepts.randint(0, self._draft_len)):
            request.sample()
            self._compute(request, len(request.tokens) - 1, len(request.tokens))
            self.num_accepted += 1
        for position in range(len(request.tokens), end):
            block, row = divmod(position, BLOCK)
            for memory in self._memories:
                for group, pages in enumerate(self._cache.pages_of(request)):
                    memory.scribble(group, pages[block], row)

    def expect(self, request: LlmRequest, first: int, end: int) -> None:
        """Note that a request's pages should hold the blocks from `first` to token `end`."""
        for memory in self._memories:
            for group, pages in enumerate(self._cache.pages_of(request)):
                live = max(first, self._cache.first_live(group, end))
                for block in range(live, -(-end // BLOCK)):
                    memory.expect(request, group, block, pages[block], end)

    def _check(self) -> None:
        self.corrupt_rows += sum(memory.stray_rows() for memory in self._memories)
