"""The plan of one pass: which promised blocks are loaded before it, which full ones saved after."""

import time
from collections.abc import Sequence
from typing import Any

from kvray.connector.engine import Engine, release_prefix
from kvray.connector.key_board import InlineKeys, KeyBoard, open_board
from kvray.connector.meta import ConnectorMeta, LoadPlan, Pages, ParkPlan, SavePlan
from kvray.connector.promise import Promise
from kvray.connector.request_state import RequestState
from kvray.connector.retention import read_priorities
from kvray.connector.staging import Staging
from kvray.errors import LeaseExpired

_BOARD_RETRY_S = 0.1


class PassPlanner:
    """Plans pass after pass for one engine; used by its executor thread."""

    def __init__(self, staging: Staging) -> None:
        """Start with nothing planned; `staging` leases what an engine takes of an offer."""
        self._staging = staging
        self._loads: list[LoadPlan] = []
        self._saves: list[SavePlan] = []
        self._priorities: list[bytes] = []
        self._tenants: list[int] = []
        self._parks: list[ParkPlan] = []
        self._board: KeyBoard | None = None
        self._inline = InlineKeys()
        self._retry_at = 0.0
        self._unfenced: set[int] = set()
        """Requests whose pages may still be read, and that were in every pass since."""
        self._scheduled: set[int] = set()

    def begin(self, engine: Engine) -> "PassPlanner":
        """Begin the plan of the coming pass."""
        self._engine = engine
        self._loads, self._saves, self._priorities, self._tenants = [], [], [], []
        self._scheduled.clear()
        for board in (self._board, self._inline):
            if board is not None:
                board.begin_pass()
        return self

    def park(self, request_id: int, promise: Promise) -> None:
        """Have the blocks of a promise made ready by every rank, from the coming pass on."""
        self._parks.append(ParkPlan(request_id, promise.prefix.leased()))

    def pin(self, request_id: int) -> None:
        """Note that the engine keeps the pages of a finished request until they were read."""
        self._unfenced.discard(request_id)

    def add_load(self, state: RequestState, report: Any, promise: Promise) -> None:
        """Plan what a request needs that is scheduled for the first time, and was promised blocks.

        Raises:
            LayoutMismatch, LeaseExpired: the promise cannot be kept; the engine must not go on.
        """
        engine, tokens_per_block = self._engine, state.tokens_per_block
        try:
            self._extend(state, report, is_new=True)
            taken, is_sure = promise.taken(
                report.computed_position, tokens_per_block, is_exact=engine.is_flat
            )
            if taken:
                promise = self._narrowed(state, promise, taken)
                pages = state.load_pages(promise.first, promise.first + taken)
                load = LoadPlan(
                    request_id=state.request_id,
                    leased=promise.prefix.leased(),
                    leased_blocks=promise.prefix.num_blocks,
                    first=promise.first,
                    pages=tuple(map(Pages.of, pages)),
                )
        except BaseException:
            release_prefix(engine, promise.prefix)
            raise
        if taken:
            self._loads.append(load)
        else:
            release_prefix(engine, promise.prefix)
        start = report.computed_position
        if not promise.is_parked and is_sure:
            start += taken * tokens_per_block
        with engine.boundary.around("a save"):
            self._save(state, start + report.num_scheduled_tokens)

    def add(self, state: RequestState, report: Any, *, is_new: bool) -> None:
        """Plan what any other request needs."""
        self._extend(state, report, is_new=is_new)
        state.rewind(report.computed_position)
        self._save(state, report.computed_position + report.num_scheduled_tokens)

    def finish(self) -> ConnectorMeta:
        """Return the metadata of the pass."""
        gone = self._unfenced - self._scheduled
        is_fenced = bool(gone) or self._engine.has_windows
        if is_fenced:
            self._unfenced.clear()
        self._unfenced.update(plan.request_id for plan in self._saves)
        parks, self._parks = tuple(self._parks), []
        releases = tuple(self._engine.to_release)
        self._engine.to_release.clear()
        return ConnectorMeta(
            namespace=self._engine.namespace_digest,
            loads=tuple(self._loads),
            saves=tuple(self._saves),
            parks=parks,
            releases=releases,
            board=self._board.place if self._saves and self._board is not None else None,
            is_fenced=is_fenced,
            replica=self._engine.replica,
            priorities=tuple(self._priorities) if any(self._priorities) else (),
            tenants=tuple(self._tenants) if any(self._tenants) else (),
        )

    def close(self) -> None:
        """Give the key board back."""
        if self._board is not None:
            self._board.close()
            self._board = None

    def _extend(self, state: RequestState, report: Any, *, is_new: bool) -> None:
        if not is_new:
            self._scheduled.add(state.request_id)  # a replay has lost the pages it had
        pages = _pages(report, len(state.windowed))
        state.extend(report.new_tokens, pages, new=is_new, priorities=read_priorities(report))

    def _narrowed(self, state: RequestState, promise: Promise, taken: int) -> Promise:
        """Return a promise whose leases have what the first `taken` blocks of the offer need."""
        end = promise.first + taken
        if end == promise.prefix.num_blocks or not self._engine.has_windows:
            return promise
        prefix = self._staging.narrowed(self._engine, promise.prefix, state.keys_until(end))
        if prefix is None:
            raise LeaseExpired(
                f"The engine took {taken} of {promise.num_blocks} blocks offered for request"
                f" {state.request_id}, whose last window is not in the tier."
            )
        release_prefix(self._engine, promise.prefix)
        promise.prefix = prefix
        return promise

    def _save(self, state: RequestState, computed_tokens: int) -> None:
        """Plan the blocks that are full after the pass and not saved yet."""
        first, end = state.num_saved, state.savable(computed_tokens)
        if end == first:
            return
        board = self._usable_board()
        if board is None:
            return  # the blocks stay as they are, the next pass may save them
        before = 1 if first else 0
        end = min(end, first + board.room - before)
        if end <= first:
            return
        keys = board.publish(state.keys_until(end)[first - before :])
        state.num_saved = end
        self._saves.append(
            SavePlan(
                request_id=state.request_id,
                depth=first,
                keys=keys,
                pages=tuple(Pages.of(group[first:end]) for group in state.pages),
            )
        )
        self._priorities.append(state.priorities.of(first, end))
        self._tenants.append(state.tenant_id)
        if not first and state.opening:
            self._engine.openings.note_stored(state.opening)

    def _usable_board(self) -> KeyBoard | InlineKeys | None:
        """Return the board in the arena that is there now, opened if it has none yet.

        Ranks on other nodes could not read it, and get the keys themselves.
        """
        arena = self._engine.link.arena
        if self._engine.spans_nodes:
            return None if arena is None else self._inline
        if self._board is not None and self._board.arena is not arena:
            self._board = None  # it went with its arena
        if self._board is None and arena is not None and time.monotonic() >= self._retry_at:
            self._board = open_board(arena, block_bytes=self._engine.part_bytes)
            if self._board is None:
                self._retry_at = time.monotonic() + _BOARD_RETRY_S
        return self._board


def _pages(report: Any, num_groups: int) -> Sequence[Sequence[int]]:
    """Return the report's new pages, one list a layer group.

    Source: `new_block_ids_by_layer_group`, a list, in some branches a mapping; empty, or not
    there, where there is one flat space, which `new_block_ids` has.
    """
    by_group = getattr(report, "new_block_ids_by_layer_group", None)
    if not by_group:
        flat: Sequence[int] = report.new_block_ids or ()
        return (flat, *((),) * (num_groups - 1))
    if isinstance(by_group, dict):
        return [by_group.get(group, ()) for group in range(num_groups)]
    return list(by_group)
