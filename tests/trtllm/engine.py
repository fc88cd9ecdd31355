"""One version's engine around a connector: what it is constructed from, and its order of calls."""

import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.trtllm.admission import Admission
from tests.trtllm.cache import Cache
from tests.trtllm.halves import construct, register, warm_up
from tests.trtllm.llm_request import LlmRequest
from tests.trtllm.memory import Memory
from tests.trtllm.model import Model
from tests.trtllm.shapes import BLOCK, FLAT, Shape
from tests.trtllm.version import Version
from tests.unit.actors.small_shard import WAIT_S

DUMMY_ID = 2**64 - 1
SEND_POLLS = 5
"""Iterations that it takes to send a prompt's blocks to a server that generates."""
OWNERS = 2
"""Under attention data parallelism, of which an engine here is one."""


class Engine:
    """Runs requests to their end on the caller's thread, one iteration at a time."""

    def __init__(
        self,
        version: Version,
        *,
        shape: Shape = FLAT,
        num_pages: int = 128,
        num_ranks: int = 1,
        owner: int | None = None,
        is_flat: bool = False,
        chunk: int | None = None,
        is_overlapped: bool = False,
        has_hooks: bool = True,
        max_batch: int = 4,
        partial_tokens: int = 0,
        draft_len: int = 0,
        cache: dict[str, Any] | None = None,
        **args: Any,
    ) -> None:
        self.version = version
        self.stand_in = stand_in = version.stand_in
        self.has_groups = stand_in.HAS_GROUPS and not is_flat
        """Whether the second cache manager is in use, which describes layer groups."""
        self.is_overlapped = is_overlapped
        self.at: dict[str, Callable[[Engine], None]] = {}
        """Called at a point of every iteration: asked, loaded, passed or ended."""
        ranks = range(num_ranks) if owner is None else [owner]
        self.memories = [
            Memory(
                shape,
                rank=rank if owner is None else 0,
                num_ranks=num_ranks,
                num_pages=num_pages,
            )
            for rank in ranks
        ]
        cache_args = {"tokens_per_block": BLOCK, "enable_block_reuse": True, **(cache or {})}
        if owner is not None:
            args["enable_attention_dp"] = True
        if draft_len:
            args["speculative_config"] = SimpleNamespace(
                decoding_type="NGram", max_draft_len=draft_len
            )
        num_args_ranks = num_ranks if owner is None else OWNERS
        self.workers, self.scheduler = construct(
            version, ranks, num_ranks=num_args_ranks, cache=cache_args, **args
        )
        warm_up(self.workers)
        register(self.workers, self.memories, stand_in, has_groups=self.has_groups)
        named = {} if owner is None else {"owner": owner}
        named |= {"is_flat": True} if is_flat and stand_in.HAS_GROUPS else {}
        self.manager = stand_in.Manager(self.workers, self.scheduler, **named)
        self.manager.draft_len = self._draft_len = draft_len
        self.cache = Cache(
            self.memories,
            [group.window for group in shape.groups],
            num_pages=num_pages,
            is_reused=bool(cache_args["enable_block_reuse"]),
            partial_tokens=partial_tokens,
        )
        self.admission = Admission(
            stand_in,
            self.manager,
            self.cache,
            has_groups=self.has_groups,
            chunk=chunk,
            max_batch=max_batch,
            draft_len=draft_len,
        )
        self.model = Model(
            self.workers,
            self.memories,
            self.cache,
            has_hooks=has_hooks,
            has_groups=self.has_groups,
            draft_len=draft_len,
        )
        self.drops_batch = False
        """Whether the coming batch is loaded for, and then put off."""
        self.num_polls = 0
        self.failure: BaseException | None = None
        """The error of the connector that ended this engine."""
        self.sending: dict[LlmRequest, int] = {}
        """Prompts that are sent to another server -> iterations until it has their blocks."""
        self._previous: list[LlmRequest] = []
        self._ids = itertools.count(1)

    def submit(
        self, tokens: list[int], *, max_new: int = 1, request_id: int | None = None, **fields: Any
    ) -> LlmRequest:
        """Take a request in, under an id of its own or one that an ended request had."""
        request = LlmRequest(
            next(self._ids) if request_id is None else request_id,
            tokens,
            known=self.stand_in.REQUEST_FIELDS,
            max_new_tokens=max_new,
            **fields,
        )
        self.admission.waiting.append(request)
        return request

    def serve(self, tokens: list[int], *, max_new: int = 1, **fields: Any) -> LlmRequest:
        """Run one request to its end; `num_hit` says how many tokens were loaded for it."""
        request = self.submit(tokens, max_new=max_new, **fields)
        self.run()
        return request

    def run(self) -> None:
        """Run until there is nothing left to do."""
        deadline = time.monotonic() + WAIT_S
        while (
            self.admission.waiting
            or self.admission.active
            or self._previous
            or self.admission.pinned
            or self.sending
        ):
            before = self.model.num_passes
            self.step()
            if self.model.num_passes == before:  # all are parked
                assert time.monotonic() < deadline, "the engine does not come to an end"
                time.sleep(0.0005)

    def step(self) -> None:
        """Do one iteration; whatever the connector raises is the engine's end."""
        try:
            self._iterate()
        except Exception as error:
            self.failure = error
            raise

    def _iterate(self) -> None:
        context, generation = self.admission.schedule()
        if context or generation:
            self.admission.prepare(context)
            self._happen("asked")
            context, generation = self._living(context), self._living(generation)
            self.manager.build_scheduler_output(context, generation, self.cache)
            context = self.manager.begin_pass(context)
            self.model.expect_loads(context)
            self._happen("loaded")
            context, generation = self._living(context), self._living(generation)
        elif self.has_groups:
            self.manager.begin_pass([])  # what is bound stays bound
        if self.drops_batch:
            context, generation, self.drops_batch = [], [], False
        batch = [*context, *generation]
        if batch:
            self.model.forward(context, generation)
        self._happen("passed")
        done = self._previous if self.is_overlapped else batch
        if self.is_overlapped:
            self._previous = batch
        self._end(done)
        self._happen("ended")
        self.num_polls += 1
        for request in self.manager.get_finished():
            self.admission.pinned.remove(request)
            self._release(request)
        self._send()

    def poll(self) -> None:
        """Do an iteration of an engine that has nothing to do."""
        assert not self.admission.active
        self.step()

    def poll_parked(self, request: LlmRequest) -> bool:
        """Ask what has ended; return whether a parked request may go on."""
        self.manager.get_finished()
        return not request.is_parked

    def kill(self, request: LlmRequest) -> None:
        """Cancel a request the way of versions that tell nobody: its pages go at once."""
        self._hand_back(request)
        self._let_go(request)
        request.is_ended = True

    def preempt(self, request: LlmRequest) -> None:
        """Take a request's pages away and have it start over."""
        self._hand_back(request)
        self._let_go(request)
        self.manager.forget(request)
        if self.stand_in.RESOLVES_LATE:
            self.manager.reset(request)
        request.restart()
        self.admission.waiting.insert(0, request)

    def overtake(self, request: LlmRequest, end: int) -> None:
        """Have the engine come by the first `end` tokens of a late request in another way."""
        start, offered, is_async = request.offer
        self.cache.extend(request, end, history=0)
        self.model.expect(request, 0, end)
        for memory in self.memories:
            memory.fill_as_expected()
        self.manager.cancel_load(request, start, end)
        request.offer = (end, offered, is_async)

    def add_dummy(self) -> None:
        """Pad every generation batch with a request that nobody has asked for."""
        dummy = LlmRequest(
            DUMMY_ID,
            [0],
            known=self.stand_in.REQUEST_FIELDS,
            max_new_tokens=10**6,
            is_dummy_request=True,
        )
        self.cache.add(dummy)
        self.cache.extend(dummy, 1, history=0)
        dummy.state = "GENERATION_IN_PROGRESS"
        self.admission.dummy = dummy

    def close(self) -> None:
        """Let go of the tier; what is saved is flushed. Twice is fine."""
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()

    @property
    def totals(self) -> Any:
        return self.workers[0]._rank.shared.figures.totals

    @property
    def arena(self) -> Any:
        return self.workers[0]._rank.shared.link.arena

    def _happen(self, point: str) -> None:
        if point in self.at:
            self.at[point](self)

    def _living(self, requests: list[LlmRequest]) -> list[LlmRequest]:
        return [one for one in requests if one in self.admission.active or one.is_dummy_request]

    def _end(self, batch: list[LlmRequest]) -> None:
        """Read what was sampled for `batch`, and end what has come to an end."""
        for request in batch:
            if request.is_dummy_request or not request.is_generating:
                continue
            if not request.is_ended:
                if self._draft_len:
                    request.num_read = len(request.tokens)
                    self.cache.rewind(request, request.num_read)
                else:
                    request.num_read += 1
                is_last = len(request.answer) >= request.max_new_tokens or request.is_only_prefilled
                request.is_ended = is_last or request.answer[-1] % 16 == 0  # an early end
            if request.is_ended and request.request_id in self.cache:
                pages = self.cache.pages_of(request)
                if request.is_only_prefilled:
                    self.sending[request] = SEND_POLLS
                    request.state = "DISAGG_CONTEXT_TRANS_IN_PROGRESS"
                if self.manager.request_finished(request, pages):
                    self.admission.pinned.append(request)
        for request in batch:
            if request.is_ended and request.is_generating and request not in self.admission.pinned:
                if self.is_overlapped:
                    # The request was in the next batch, too, which knew nothing of its end.
                    self.manager.request_finished(request, [[] for _ in self.cache.windows])
                self._let_go(request)

    def _send(self) -> None:
        """Send blocks of prompts for one iteration more, and look at what has arrived."""
        for request in [one for one, polls in self.sending.items() if polls == 1]:
            del self.sending[request]
            self.model.read(request, request.prompt_len)
            self._release(request)
        self.sending = {request: polls - 1 for request, polls in self.sending.items()}

    def _release(self, request: LlmRequest) -> None:
        """Let a request go once neither the connector nor a server reads its blocks."""
        if request not in self.admission.pinned and request not in self.sending:
            self._let_go(request)

    def _hand_back(self, request: LlmRequest) -> None:
        if request.offer is None or request.was_reported or request.is_parked:
            return
        start, end, _ = request.offer
        if self.stand_in.RESOLVES_LATE and end > start:
            self.manager.cancel_load(request, start, end)

    def _let_go(self, request: LlmRequest) -> None:
        computed = request.context_current_position
        if request.is_generating:
            computed = max(computed, request.num_read - 1)
        if request.is_parked or (request.num_hit and not request.is_generating):
            computed = 0  # nothing of it is sure to be there
        self.cache.free(request, computed=computed)
        for requests in (self.admission.active, self.admission.waiting, self._previous):
            if request in requests:
                requests.remove(request)
