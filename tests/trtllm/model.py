"""The model of an engine: reads all that a token attends to, checks it, and writes its own rows."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvray.reference.request import ScheduledRequests
from tests.trtllm.cache import DUMMY_ID, Cache
from tests.trtllm.llm_request import LlmRequest
from tests.trtllm.memory import BLOCK, Memory


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
    ) -> None:
        self.corrupt_rows = 0
        self.num_accepted = 0
        """Drafted tokens that turned out to be those of the answer."""
        self.num_passes = 0
        self._workers = workers
        self.memories = memories
        self._cache = cache
        self._has_hooks = has_hooks
        self._has_groups = has_groups
        self._layers = sorted(layer for group in memories[0].shape.groups for layer in group.layers)
        self.stream = None
        self._computed: dict[LlmRequest, int] = {}
        """How many tokens of each request the pass has left behind, until its end."""

    def expect_loads(self, batch: ScheduledRequests) -> None:
        """Check that what was promised to first chunks is there, and nothing else has changed.

        Blocks are loaded whole: the engine may count on only the first tokens of the last one.
        """
        for request in batch.context_requests:
            if request.num_hit:
                end = request.context_current_position
                first, stop = (end - request.num_hit) // BLOCK, -(-end // BLOCK)
                self.expect(request, first, stop * BLOCK)
        self.check()

    def forward(self, batch: ScheduledRequests, _pending: Mapping[int, int]) -> dict[int, int]:
        """Compute a pass with the hooks in it; return the next token of each request that has one.

        A dummy computes nothing that anybody reads.
        """
        self.num_passes += 1
        layers = self._layers if self._has_hooks and batch.context_requests else ()
        for layer in layers:
            for worker in self._workers:
                worker.wait_for_layer_load(layer, None)
        self._computed = {}
        sampled = {}
        for request in batch.context_requests:
            end = request.context_current_position + request.context_chunk_size
            self._compute(request, request.context_current_position, end)
            if end == request.prompt_len:
                sampled[request.request_id] = request.token_at(end)
        for request in batch.generation_requests:
            if request.request_id != DUMMY_ID:
                sampled[request.request_id] = self._generate(request)
        for layer in layers:
            for worker in self._workers:
                worker.save_kv_layer(layer, None)
        return sampled

    def end_pass(self) -> None:
        """Check all pages once the saves have read them, and give back what windows have passed."""
        self.check()
        for request, end in self._computed.items():
            if self._has_groups:
                self._cache.pass_windows(request, end)
                self._cache.replace_pages(request)
        self._computed = {}

    def read(self, request: LlmRequest, end: int) -> None:
        """Read all that a token at `end` attends to."""
        for memory in self.memories:
            for group, pages in enumerate(self._cache.pages_of(request)):
                for block in range(self._cache.first_live(group, end), -(-end // BLOCK)):
                    self.corrupt_rows += memory.corrupt_rows(
                        request, group, block, pages[block], end
                    )

    def expect(self, request: LlmRequest, first: int, end: int) -> None:
        """Note that a request's pages should hold the blocks from `first` to token `end`."""
        for memory in self.memories:
            for group, pages in enumerate(self._cache.pages_of(request)):
                live = max(first, self._cache.first_live(group, end))
                for block in range(live, -(-end // BLOCK)):
                    memory.expect(request, group, block, pages[block], end)

    def check(self) -> None:
        self.corrupt_rows += sum(memory.stray_rows() for memory in self.memories)

    def _compute(self, request: LlmRequest, start: int, end: int) -> None:
        """Read all that the tokens from `start` to `end` attend to, and write them.

        What attends to wrong rows is as wrong.
        """
        known = self.corrupt_rows
        self.read(request, start)
        for memory in self.memories:
            for group, pages in enumerate(self._cache.pages_of(request)):
                for block in range(start // BLOCK, -(-end // BLOCK)):
                    memory.compute(request, group, block, pages[block], start, end)
        if self.corrupt_rows > known:
            self._scribble(request, start, end)
        self._computed[request] = end

    def _generate(self, request: LlmRequest) -> int:
        """Compute the newest token and its drafts, and return what follows the right ones."""
        newest, drafts = request.num_computed_tokens, request.py_draft_tokens
        self._compute(request, newest, newest + 1)
        end = newest + 1
        while end - newest <= len(drafts) and drafts[end - newest - 1] == request.token_at(end):
            self._compute(request, end, end + 1)
            end += 1
        request.py_num_accepted_draft_tokens = end - newest - 1
        self.num_accepted += end - newest - 1
        self._scribble(request, end, newest + 1 + len(drafts))  # what rejected tokens leave behind
        return request.token_at(end)

    def _scribble(self, request: LlmRequest, start: int, end: int) -> None:
        """Write rows that belong to no token in the places of those from `start` to `end`."""
        for position in range(start, end):
            block, row = divmod(position, BLOCK)
            for memory in self.memories:
                for group, pages in enumerate(self._cache.pages_of(request)):
                    memory.scribble(group, pages[block], row)
