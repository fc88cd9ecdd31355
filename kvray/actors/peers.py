"""What one shard knows of the others: who may be asked now, how fast they are, how they failed."""

import asyncio
import bisect
import time
from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Any

from kvray.actors.arguments import in_pieces, packed
from kvray.actors.async_calls import Ask
from kvray.actors.orders import FetchOrder, FetchReport, SourceReport
from kvray.actors.rates import Rates
from kvray.actors.ray_calls import LOOKUP_NAME, MOVER_PREFIX, SHARD_PREFIX
from kvray.actors.staging import Peer, Run
from kvray.breaker import Breaker
from kvray.errors import KVRayError, ShardUnavailable, TransferError

_HOMES_S = 2.0
"""How long it counts where the ranks of a replica are."""
_HOMES_MAX = 1024
_BREAKERS_MAX = 1024
_FAULTS = frozenset({"ShardUnavailable", "TransferError", "TransferTimeout"})
"""Errors of a fetch that are the source's, as far as can be told."""


def mover_of(shard: str) -> str:
    """Return the name of the mover on a shard's node."""
    return MOVER_PREFIX + shard.removeprefix(SHARD_PREFIX)


class Peers:
    """Calls to lookup, movers and other shards, each behind a breaker; state of the event loop.

    A call to what has just failed is not made: it raises at once, and costs nobody any time. Nor is
    a request made to find out whether it answers again; that is what pings are for.
    """

    def __init__(
        self,
        shard: str,
        ask: Ask,
        *,
        call_timeout_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Call for `shard`.

        Args:
            shard: its own name.
            ask: makes the calls.
            call_timeout_s: how long an answer may take that needs no work.
            now: monotonic seconds.
        """
        self.shard = shard
        self._ask = ask
        self._call_timeout_s = call_timeout_s
        self._now = now
        self._random = Random(shard)
        self._breakers: dict[str, Breaker] = {}
        self._pings: dict[str, asyncio.Task[Any]] = {}
        self._answering: set[str] = set()
        """Those that failed, and have answered to a ping since."""
        self._rates = Rates()
        self._homes: dict[str, tuple[float, dict[int, str]]] = {}

    async def locate(self, keys: bytes) -> list[Run]:
        """Return who has which of `keys`, in their order.

        Raises:
            ShardUnavailable: the lookup did not answer, or has not lately.
        """
        runs = await self.call(LOOKUP_NAME, "locate", *in_pieces(keys))
        return [(run.stop, run.holders) for run in runs]

    async def fetch(self, order: FetchOrder) -> FetchReport:
        """Have this node's mover bring blocks here, and remember how its sources did.

        Raises:
            ShardUnavailable: the mover did not answer, or has not lately.
        """
        for source in {span.source for span in order.spans}:
            self._breaker(source).begin(self._now())
        report: FetchReport = await self._call_watched(
            mover_of(self.shard), "fetch", *packed(order), work_s=order.deadline_s
        )
        for source, one in report.sources.items():
            self._note(source, one)
        return report

    async def introduce(self) -> None:
        """Have this node's mover meet all others, and forget the peers that the tier has no more.

        What the first request would have to wait for is looked up and connected by that.

        Raises:
            ShardUnavailable: lookup or mover did not answer.
        """
        shards = sorted(await self._ask(LOOKUP_NAME, "shards", timeout_s=self._call_timeout_s))
        movers = [mover_of(shard) for shard in shards]
        self._retain({LOOKUP_NAME, self.shard, mover_of(self.shard), *shards, *movers})
        # In a tier so large that not all are met, everybody begins elsewhere.
        place = bisect.bisect(shards, self.shard)
        others = [one for one in movers[place:] + movers[:place] if one != mover_of(self.shard)]
        own = mover_of(self.shard)
        await self._ask(own, "meet", others, timeout_s=self._call_timeout_s)
        nothing = FetchOrder(spans=(), deadline_s=self._call_timeout_s)
        await self._ask(own, "fetch", nothing, timeout_s=2 * self._call_timeout_s)

    @property
    def can_fetch(self) -> bool:
        """Whether this node's mover may be called now."""
        return self._state(mover_of(self.shard)) != "open"

    async def homes(self, replica: str) -> Mapping[int, str]:
        """Return rank -> shard for the ranks of `replica`, as the lookup had it lately.

        Raises:
            ShardUnavailable: the lookup did not answer, or has not lately.
        """
        at, known = self._homes.get(replica, (float("-inf"), {}))
        if self._now() - at > _HOMES_S:
            known = await self.call(LOOKUP_NAME, "replica", replica)
            self._homes.pop(replica, None)
            self._homes[replica] = self._now(), known
            if len(self._homes) > _HOMES_MAX:
                del self._homes[next(iter(self._homes))]
        return known

    def forget_homes(self, replica: str) -> None:
        """Ask anew where its ranks are: one was not where it should be."""
        self._homes.pop(replica, None)

    async def call(self, actor: str, method: str, *args: Any, work_s: float = 0.0) -> Any:
        """Call an actor if it may be called now.

        Who cannot wait so long stops waiting, but lets the call go on: else a peer that does not
        answer would never be found out by those in a hurry.

        Args:
            actor: its name.
            method: what to call.
            args: its arguments.
            work_s: how long the other side may work on it; the deadline is `call_timeout_s` later.

        Raises:
            ShardUnavailable: no answer in time, or it is left alone after a failure.
            KVRayError: what it answered with.
        """
        breaker = self._breaker(actor)
        if self._state(actor) == "open":
            raise ShardUnavailable(f"{actor} is left alone for now: {breaker.error}")
        breaker.begin(self._now())
        try:
            answer = await self._ask(actor, method, *args, timeout_s=work_s + self._call_timeout_s)
        except (ShardUnavailable, TransferError) as error:
            self._fail(actor, error)
            raise
        except KVRayError:
            breaker.succeed()
            raise
        breaker.succeed()
        return answer

    def ping(self) -> None:
        """Ping those that failed and whose pause is over; called often."""
        for name in list(self._breakers):
            self._state(name)

    def close(self) -> None:
        """Ping nobody any more. Twice is fine."""
        for task in self._pings.values():
            task.cancel()

    async def _call_watched(self, actor: str, method: str, *args: Any, work_s: float) -> Any:
        """Call as `call`, but give up as soon as the actor does not answer to a ping.

        Work may take seconds; that the actor is frozen is known after one.

        Raises:
            ShardUnavailable, KVRayError: see `call`.
        """
        work = asyncio.ensure_future(self.call(actor, method, *args, work_s=work_s))
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
            return await work
        finally:
            work.cancel()

    def may_ask(self, shards: Iterable[str], *, without: frozenset[str]) -> dict[str, Peer]:
        """Return what is known of those of `shards` that may be asked for blocks now.

        Their order is another one for each shard: what all want is not taken from the same one.

        Args:
            shards: names of shards.
            without: movers that are not to be asked.
        """
        found = {}
        for shard in sorted(shards, key=lambda name: (name < self.shard, name)):
            mover = mover_of(shard)
            state = self._state(mover)
            if shard != self.shard and mover not in without and state != "open":
                way = self._rates.of(mover, self._now())
                found[shard] = Peer(
                    latency_s=way.latency_s if way else 0.0,
                    bytes_per_s=way.bytes_per_s if way else None,
                    is_doubtful=state == "half-open",
                )
        return found

    def status(self) -> list[dict[str, Any]]:
        """Return one entry for every process that was called or gave blocks; from any thread."""
        now, ways = self._now(), self._rates.latest()
        breakers = dict(self._breakers)
        return [
            {
                "peer": name,
                "transport": ways[name].transport if name in ways else None,
                "bytes_per_s": ways[name].bytes_per_s if name in ways else None,
                "breaker": breakers[name].state(now) if name in breakers else "closed",
                "error": breakers[name].error if name in breakers else "",
            }
            for name in sorted({*ways, *breakers})
        ]

    def _retain(self, names: set[str]) -> None:
        """Forget all but these: a node that comes back has another name."""
        self._breakers = {name: one for name, one in self._breakers.items() if name in names}
        self._answering &= names
        self._rates.retain(names)

    def _note(self, source: str, report: SourceReport) -> None:
        breaker = self._breaker(source)
        if report.error in _FAULTS:
            self._fail(source, report.message or report.error or "")
        else:
            breaker.succeed()
        self._rates.note(
            source,
            report.transport,
            num_bytes=report.num_bytes,
            seconds=report.seconds,
            now=self._now(),
        )

    def _state(self, name: str) -> str:
        """Return the state of a breaker, which is open until a ping was answered."""
        known = self._breakers.get(name)
        if known is None:
            return "closed"
        state = known.state(self._now())
        if state == "half-open" and name not in self._answering:
            if name not in self._pings:
                task = asyncio.get_running_loop().create_task(
                    self._ask(name, "ping", timeout_s=self._call_timeout_s)
                )
                self._pings[name] = task
                task.add_done_callback(lambda done: self._take_ping(name, done))
            return "open"
        return state

    def _take_ping(self, name: str, ping: "asyncio.Task[Any]") -> None:
        del self._pings[name]
        if ping.cancelled() or name not in self._breakers:
            return
        error = ping.exception()
        if error is None or (
            isinstance(error, KVRayError) and not isinstance(error, ShardUnavailable)
        ):
            self._answering.add(name)
        else:
            self._fail(name, error)

    def _fail(self, name: str, error: BaseException | str) -> None:
        self._answering.discard(name)
        self._breaker(name).fail(self._now(), str(error))

    def _breaker(self, name: str) -> Breaker:
        breaker = self._breakers.get(name)
        if breaker is None:
            if len(self._breakers) >= _BREAKERS_MAX:
                del self._breakers[next(iter(self._breakers))]
            breaker = self._breakers[name] = Breaker(self._random)
        return breaker
