"""The other actors as one shard sees them: which may be asked, how fast, how they failed.

`Ask` is the type of their calls; a `Rate` is the measured speed of a source.
"""

import asyncio
import bisect
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from kvray.actors.mover.orders import FetchOrder, FetchReport, SourceReport
from kvray.actors.names import LOOKUP_NAME, MOVER_PREFIX, SHARD_PREFIX, is_lookup
from kvray.actors.ray_glue.arguments import packed
from kvray.actors.staging.plan import Peer
from kvray.breaker import Breaker
from kvray.errors import KVRayError, ShardUnavailable, TransferError

_WEIGHT = 0.3  # weight of the newest measurement
_SMALL = 2**20
"""A fetch below this many bytes measures the latency, one above it the rate."""
_FORGET_S = 30.0
"""Older measurements do not count, or a node once found slow would never be tried again."""


@dataclass(slots=True)
class Rate:
    """The measurements of one source, by the transport that it used last."""

    transport: str = ""
    """Empty: it gave no blocks yet."""
    latency_s: float = 0.0
    bytes_per_s: float | None = None
    """None: no fetch was large enough to measure it."""
    at: float = float("-inf")

    def note(self, report: SourceReport, *, now: float) -> None:
        """Take the measurement of a fetch that brought blocks."""
        if report.num_bytes <= 0 or report.seconds <= 0:
            return
        if self.transport != report.transport or now - self.at > _FORGET_S:
            self.transport, self.latency_s, self.bytes_per_s = report.transport, 0.0, None
        # Each is a bound of what the other kind measures: else one bad moment would stay there, and
        # keep its kind from being fetched and measured again.
        if report.num_bytes < _SMALL:
            self.latency_s = _blend(self.latency_s or None, report.seconds)
            if self.bytes_per_s is not None:
                self.bytes_per_s = max(self.bytes_per_s, report.num_bytes / report.seconds)
        else:
            self.latency_s = min(self.latency_s, report.seconds / 2)
            moving_s = report.seconds - self.latency_s
            self.bytes_per_s = _blend(self.bytes_per_s, report.num_bytes / moving_s)
        self.at = now

    def peer(self, now: float, *, has_failed: bool = False) -> Peer:
        """Return a source as the planner sees it; a measurement that is too old does not count."""
        if now - self.at > _FORGET_S:
            return Peer(has_failed=has_failed)
        return Peer(latency_s=self.latency_s, bytes_per_s=self.bytes_per_s, has_failed=has_failed)


def _blend(before: float | None, measured: float) -> float:
    return measured if before is None else before + _WEIGHT * (measured - before)


class Ask(Protocol):
    """Calls a method of a named actor in another process."""

    async def __call__(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        """Return the method's answer, or raise its KVRayError.

        ShardUnavailable: no answer within `timeout_s`, or there is no such actor.
        """
        ...


async def ask_nobody(actor: str, method: str, *args: Any, timeout_s: float) -> Any:
    """Fail: the `Ask` of a shard without Ray."""
    raise ShardUnavailable(f"{actor} cannot be called: this shard was started without Ray.")


_HOMES_S = 2.0  # how long the whereabouts of a replica's ranks count
_HOMES_MAX = 1024
_ACTORS_MAX = 1024
_FAULTS = frozenset({"ShardUnavailable", "TransferError", "TransferTimeout"})
"""Errors of a fetch that its source is to blame for, as far as can be told."""
_CONNECT_S = 5.0  # how often the mover's list of other movers is renewed
_CONNECTS_PER_S = 50  # by all nodes together: each asks the lookup for the names of all shards


def mover_of(shard: str) -> str:
    """Return the name of the mover on a shard's node."""
    return MOVER_PREFIX + shard.removeprefix(SHARD_PREFIX)


def shard_of(mover: str) -> str:
    """Return the name of the shard on a mover's node."""
    return SHARD_PREFIX + mover.removeprefix(MOVER_PREFIX)


@dataclass(slots=True)
class _Actor:
    """What is known of another actor."""

    breaker: Breaker
    rate: Rate = field(default_factory=Rate)
    ping: "asyncio.Task[Any] | None" = None
    """The one under way."""
    has_answered: bool = False
    """Whether it has failed and has answered a ping since."""


class Peers:
    """Calls to lookup, movers and other shards, each behind a breaker; state of the event loop.

    A call to an actor that has just failed raises at once, and costs no time. No request has to
    find out whether the actor answers again; pings do that.
    """

    def __init__(
        self,
        shard: str,
        ask: Ask,
        *,
        call_timeout_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """An answer that needs no work may take `call_timeout_s`."""
        self.shard = shard
        self._mover = mover_of(shard)
        self._ask = ask
        self._call_timeout_s = call_timeout_s
        self._now = now
        self._random = Random(shard)
        self._actors: dict[str, _Actor] = {}
        self._calls: set[asyncio.Task[Any]] = set()
        """Those under way, which the loop alone would not keep alive."""
        self._homes: dict[str, tuple[float, dict[int, str]]] = {}
        self._connecting: asyncio.Task[None] | None = None
        self._num_shards = 0
        self._connect_at = self._connected_at = float("-inf")

    def tick(self, now: float, *, num_shards: int) -> None:
        """Ping and connect where that is due; called often, waits for nothing.

        `num_shards` counts the live shards of the tier, this one included; 0: not known.
        """
        for name in list(self._actors):
            self._state(name)  # which pings those whose pause is over
        pause_s = num_shards / _CONNECTS_PER_S
        if num_shards != self._num_shards:
            self._num_shards = num_shards
            self._connect_at = min(self._connect_at, self._connected_at + pause_s)
        is_busy = self._connecting is not None and not self._connecting.done()
        if num_shards > 1 and now >= self._connect_at and not is_busy:
            self._connected_at, self._connect_at = now, now + max(_CONNECT_S, pause_s)
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def fetch(self, order: FetchOrder) -> FetchReport:
        """Have this node's mover fetch blocks, and note how its sources did; raises as `call`."""
        for source in {span.source for span in order.spans}:
            self._actor(source).breaker.begin(self._now())
        report: FetchReport = await self.call_watched(
            self._mover, "fetch", *packed(order), work_s=order.deadline_s
        )
        for source, one in report.sources.items():
            is_slow = one.error == "TransferTimeout" and one.num_bytes  # which its rate tells
            if one.error in _FAULTS and not is_slow:
                self._fail(source, one.message or one.error or "")
            else:
                self._actor(source).breaker.succeed()
            self._actor(source).rate.note(one, now=self._now())
        return report

    async def connect(self) -> None:
        """Have this node's mover shake hands with all others, and forget peers that have left.

        The first request then finds every actor looked up and every link connected. Raises as
        `call`.
        """
        shards = sorted(await self._ask(LOOKUP_NAME, "shards", timeout_s=self._call_timeout_s))
        movers = [mover_of(shard) for shard in shards]
        known = {self.shard, self._mover, *shards, *movers}
        self._actors = {  # a node that comes back has another name
            name: one for name, one in self._actors.items() if name in known or is_lookup(name)
        }
        # A mover connects with some movers of a large tier; each begins elsewhere.
        place = bisect.bisect(shards, self.shard)
        others = [one for one in movers[place:] + movers[:place] if one != self._mover]
        await self._ask(self._mover, "connect", others, timeout_s=self._call_timeout_s)
        nothing = FetchOrder(spans=(), deadline_s=self._call_timeout_s)
        await self._ask(self._mover, "fetch", nothing, timeout_s=2 * self._call_timeout_s)

    @property
    def can_fetch(self) -> bool:
        """Whether this node's mover may be called now."""
        return self._state(self._mover) != "open"

    async def homes(self, replica: str) -> Mapping[int, str]:
        """Return rank -> shard of a replica, as the lookup said lately; raises as `call`."""
        at, known = self._homes.get(replica, (float("-inf"), {}))
        if self._now() - at > _HOMES_S:
            known = await self.call(LOOKUP_NAME, "replica", replica)
            self.forget_homes(replica)
            self._homes[replica] = self._now(), known
            if len(self._homes) > _HOMES_MAX:
                del self._homes[next(iter(self._homes))]
        return known

    def forget_homes(self, replica: str) -> None:
        """Ask the lookup again next time: a rank was not where it should be."""
        self._homes.pop(replica, None)

    async def call(self, actor: str, method: str, *args: Any, work_s: float = 0.0) -> Any:
        """Call an actor if it may be called now; the deadline is `work_s + call_timeout_s`.

        A caller in a hurry stops waiting but lets the call go on. Otherwise hurried calls alone
        would never find out that a peer does not answer.

        Raises:
            ShardUnavailable: no answer in time, or it is left alone after a failure.
            KVRayError: the error that it answered with.
        """
        return await asyncio.shield(self._begin(actor, method, *args, work_s=work_s))

    async def call_watched(self, actor: str, method: str, *args: Any, work_s: float) -> Any:
        """Call as `call`, but give up as soon as the actor does not answer a ping.

        Work may take seconds; a frozen actor is noticed after one. The caller's end is the call's.
        """
        work = self._begin(actor, method, *args, work_s=work_s)
        try:
            while not (await asyncio.wait({work}, timeout=self._call_timeout_s / 2))[0]:
                ping = asyncio.ensure_future(
                    self._ask(actor, "ping", timeout_s=self._call_timeout_s)
                )
                await asyncio.wait({work, ping}, return_when=asyncio.FIRST_COMPLETED)
                if not ping.done():
                    ping.cancel()
                elif (error := ping.exception()) is not None and not work.done():
                    self._fail(actor, error)
                    raise error
            return work.result()
        finally:
            work.cancel()

    def close(self) -> None:
        """End pings and connecting; calls end by their deadlines. Twice is fine."""
        for task in (*(one.ping for one in self._actors.values()), self._connecting):
            if task is not None:
                task.cancel()

    def _begin(self, actor: str, method: str, *args: Any, work_s: float) -> "asyncio.Task[Any]":
        breaker = self._actor(actor).breaker
        if self._state(actor) == "open":
            raise ShardUnavailable(f"{actor} is left alone for now: {breaker.error}")
        breaker.begin(self._now())
        timeout_s = work_s + self._call_timeout_s
        task = asyncio.get_running_loop().create_task(
            self._answer(actor, method, *args, timeout_s=timeout_s)
        )
        self._calls.add(task)
        task.add_done_callback(self._end_call)
        return task

    def _end_call(self, call: "asyncio.Task[Any]") -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # looked at: a late call has no caller, and its breaker knows

    async def _answer(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        try:
            answer = await self._ask(actor, method, *args, timeout_s=timeout_s)
        except (ShardUnavailable, TransferError) as error:
            self._fail(actor, error)
            raise
        except KVRayError:
            self._actor(actor).breaker.succeed()
            raise
        self._actor(actor).breaker.succeed()
        return answer

    async def _connect(self) -> None:
        # A request that needs a silent actor finds that out by itself.
        with contextlib.suppress(KVRayError):
            await self.connect()

    def may_ask(self, shards: Iterable[str], *, without: frozenset[str]) -> dict[str, Peer]:
        """Return those of `shards` that may be asked for blocks now, with their rates.

        Each shard has them in another order, so that not all fetch a popular block from one. Shards
        whose movers are in `without` are left out.
        """
        found = {}
        for shard in sorted(shards, key=lambda name: (name < self.shard, name)):
            mover = mover_of(shard)
            state = self._state(mover)
            if shard != self.shard and mover not in without and state != "open":
                has_failed = state == "half-open"
                found[shard] = self._rate(mover).peer(self._now(), has_failed=has_failed)
        return found

    def measured(self) -> dict[str, Peer]:
        """Return the shards that gave blocks lately, and how fast."""
        now = self._now()
        found = {shard_of(name): one.rate.peer(now) for name, one in self._actors.items()}
        return {shard: peer for shard, peer in found.items() if peer != Peer()}

    def last_transport(self, shard: str) -> str:
        """Return the transport by which a shard's mover gave blocks last; empty: it never did."""
        return self._rate(mover_of(shard)).transport

    def status(self) -> list[dict[str, Any]]:
        """Return one entry for each process that was called or gave blocks; from any thread."""
        now = self._now()
        return [
            {
                "peer": name,
                "transport": one.rate.transport or None,
                "bytes_per_s": one.rate.bytes_per_s,
                "latency_s": one.rate.latency_s or None,
                "breaker": one.breaker.state(now),
                "error": one.breaker.error,
            }
            for name, one in sorted(dict(self._actors).items())
        ]

    def _state(self, name: str) -> str:
        """Return the state of a breaker, which stays open until a ping is answered."""
        known = self._actors.get(name)
        state = "closed" if known is None else known.breaker.state(self._now())
        if known is None or state != "half-open" or known.has_answered:
            return state
        if known.ping is None:
            known.ping = asyncio.get_running_loop().create_task(
                self._ask(name, "ping", timeout_s=self._call_timeout_s)
            )
            known.ping.add_done_callback(lambda done: self._take_ping(name, known, done))
        return "open"

    def _take_ping(self, name: str, known: _Actor, ping: "asyncio.Task[Any]") -> None:
        known.ping = None
        if ping.cancelled():
            return
        error = ping.exception()
        if self._actors.get(name) is not known:
            return
        if isinstance(error, ShardUnavailable) or not isinstance(error, KVRayError | None):
            self._fail(name, error)
        else:
            known.has_answered = True

    def _fail(self, name: str, error: BaseException | str) -> None:
        known = self._actor(name)
        known.has_answered = False
        known.breaker.fail(self._now(), str(error))

    def _rate(self, name: str) -> Rate:
        known = self._actors.get(name)
        return Rate() if known is None else known.rate

    def _actor(self, name: str) -> _Actor:
        known = self._actors.get(name)
        if known is None:
            if len(self._actors) >= _ACTORS_MAX:
                del self._actors[next(iter(self._actors))]
            known = self._actors[name] = _Actor(Breaker(self._random))
        return known
