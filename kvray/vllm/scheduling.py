"""The scheduler's half of the connector: vLLM's requests as the leader knows requests.

vLLM names requests by text, the leader by number; each gets a number when it is first asked about.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from kvray.engine.leader import Leader
from kvray.engine.request.report import PassReport
from kvray.engine.shared_state import SharedState
from kvray.vllm.identity import RequestReader
from kvray.vllm.metadata import PassMetadata, PoolMetadata


@dataclass(slots=True, kw_only=True)
class _Known:
    """A request between its first query and its end."""

    number: int
    request: Any  # vLLM's own, which has the tokens
    num_external: int = 0
    """Tokens that vLLM took of the last offer and whose pass is not planned yet."""
    last_hit: int = 0  # the same, until it is asked about again
    num_hit: int = 0  # all that it took
    is_begun: bool = False  # whether a pass has had it
    is_saved: bool = False  # whether a pass has saved blocks of it


class SchedulingHalf:
    """Used by the thread of vLLM's scheduler."""

    def __init__(self, shared: SharedState) -> None:
        self._leader = Leader(shared, asks_in_vain=True)
        self._reader: RequestReader | None = None
        self._known: dict[str, _Known] = {}
        self._numbers = count()
        self._planned: dict[int, str] = {}
        """The requests of the pass that is being planned: number -> vLLM's name."""

    def lead(self, metadata: Any) -> None:
        """Hear what a rank has registered; nothing is promised before."""
        assert isinstance(metadata, PoolMetadata), "it comes from the other half"
        self._leader.shared.pool.lead(metadata.facts)

    def ask(self, request: Any, num_computed: int) -> int | None:
        """Promise what can be loaded after vLLM's own tokens; return how many tokens that is.

        None: the shard has been asked, and vLLM is to ask again.
        """
        known = self._known.get(request.request_id)
        if known is None or known.request is not request:
            known = _Known(number=next(self._numbers), request=request)
            self._known[request.request_id] = known
        known.num_external = 0
        read = partial(self._read, known, num_computed)
        return self._leader.ask(known.number, read)

    def allocated(self, request: Any, num_external: int) -> None:
        """Note how much of the offer vLLM takes: all of it or nothing."""
        known = self._known.get(request.request_id)
        if known is not None:
            known.num_external = known.last_hit = num_external
            known.num_hit += num_external
            if not num_external:
                self._leader.decline(known.number)
            self._leader.count(known.number)

    def plan(self, output: Any) -> PassMetadata:
        """Return what the ranks do in the coming pass."""
        self._planned.clear()
        reports = list(self._reports(output))
        meta = self._leader.plan([(report, report.is_new) for report in reports])
        names: dict[int, str] = {}
        if not self._leader.shared.pool.is_host:  # else they are read by the end of the pass
            for plan in meta.saves:
                name = self._planned[plan.request_id]
                if not self._known[name].is_saved:
                    self._known[name].is_saved, names[plan.request_id] = True, name
        return PassMetadata(meta=meta, names=names)

    def note_failed(self, block_ids: Collection[int]) -> None:
        """Take blocks that could not be loaded, and what follows them, for not stored."""
        for known in self._known.values() if block_ids else ():
            state = self._leader.states.get(known.number)
            if state is not None and state.lose(block_ids):
                known.num_hit, known.last_hit = known.num_hit - known.last_hit, 0

    def finish(self, name: str) -> tuple[bool, int]:
        """Return whether a save still reads blocks of a request that has ended, and its hits."""
        known = self._known.pop(name, None)
        if known is None:
            return False, 0
        self._leader.finish(known.number)
        if known.is_saved:
            self._leader.pin(known.number)  # the ranks tell when they have read its blocks
        return known.is_saved, known.num_hit

    def reset(self) -> None:
        """Go without the tier until a version is named: the weights may have been replaced."""
        self._leader.shared.pool.name_weights(None)

    def close(self) -> None:
        """Release what is promised and let go of the tier. Twice is fine."""
        self._leader.close()

    def _read(self, known: _Known, num_computed: int, shared: SharedState) -> Any:
        if self._reader is None:
            self._reader = RequestReader(shared)
        return self._reader.read(known.request, known.number, num_computed)

    def _reports(self, output: Any) -> Iterator[PassReport]:
        """Yield what the pass has of each request that was asked about.

        Source: `SchedulerOutput`. A request that comes back after it was preempted has all its
        blocks named again, as one that is new.
        """
        for data in output.scheduled_new_reqs:
            position, scheduled = data.num_computed_tokens, output.num_scheduled_tokens
            yield from self._report(data.req_id, data.block_ids, position, scheduled, is_new=True)
        cached = output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for name, block_ids, position in rows:
            is_new = name in cached.resumed_req_ids
            scheduled = output.num_scheduled_tokens
            yield from self._report(name, block_ids, position, scheduled, is_new=is_new)

    def _report(
        self,
        name: str,
        block_ids: tuple[list[int], ...] | None,
        position: int,
        scheduled: dict[str, int],
        *,
        is_new: bool,
    ) -> Iterator[PassReport]:
        known = self._known.get(name)
        state = None if known is None else self._leader.states.get(known.number)
        if known is None or state is None:
            return
        if is_new and known.is_begun:  # it was preempted
            self._leader.shared.figures.totals["resumed_requests"] += 1
        num_external, known.num_external = known.num_external, 0
        known.is_begun = True
        self._planned[known.number] = name
        told = 0 if is_new else state.num_tokens
        yield PassReport(
            request_id=known.number,
            new_tokens=list(known.request.all_token_ids[told:]),
            new_block_ids=list(block_ids[0]) if block_ids else [],
            computed_position=position - num_external,
            num_scheduled_tokens=scheduled[name],
            is_new=is_new,
        )
