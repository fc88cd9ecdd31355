"""What a router asks of the tier about a prompt: never for longer than a deadline."""

import asyncio
import logging
import random
import time
from collections.abc import Sequence

from kvray.actors.names import LOOKUP_NAME
from kvray.actors.ray_glue.calls import tier_named
from kvray.actors.staging.ask import Ask
from kvray.breaker import Breaker
from kvray.errors import KVRayError
from kvray.identity.keys import Tokens, pack_tokens
from kvray.routing import Outcomes, Survey, read_survey

_log = logging.getLogger("ray.serve")

_HOME_S = 30.0
"""How long the node of a replica counts as known; ranks hardly ever move."""
_HOME_RETRY_S = 1.0
_HOME_TIMEOUT_S = 2.0
_UNKNOWN_S = 30.0


class Surveys:
    """Asks shards about prompts; for one event loop.

    While the tier does not answer, a request waits once for the deadline; further ones do not ask
    for a while that doubles, up to seconds.
    """

    def __init__(
        self, ask: Ask, cluster_name: str, *, timeout_s: float, outcomes: Outcomes
    ) -> None:
        """Ask the tier of that name, each time for at most `timeout_s`; count in `outcomes`."""
        self._ask = ask
        self._cluster_name = cluster_name
        self._timeout_s = timeout_s
        self._outcomes = outcomes
        self._breaker = Breaker(random.Random())
        # Replica -> its shard, empty if it has none, and until when that counts.
        self._homes: dict[str, tuple[str, float]] = {}
        self._finding: asyncio.Task[None] | None = None
        self._unknown_since: float | None = None
        self._has_said = False

    def home(self, replica: str) -> str:
        """Return the shard with which a replica has registered; empty if that is not known."""
        return self._homes.get(replica, ("", 0.0))[0]

    async def survey(
        self,
        tokens: Tokens,
        replicas: Sequence[str],
        *,
        salt: str | int | None = None,
        lora: str | None = None,
    ) -> Survey | None:
        """Return where a prompt's blocks are; None if nobody said so in time."""
        now = time.monotonic()
        self._find_homes(replicas, now)
        asked = next((name for name in replicas if self.home(name)), None)
        self._say_if_unknown(replicas, is_unknown=asked is None)
        if asked is None or self._breaker.state(now) == "open":
            self._outcomes.surveyed("skipped")
            return None
        self._breaker.begin(now)
        had_failed = self._breaker.error
        try:
            with tier_named(self._cluster_name):
                found = await self._ask(
                    self.home(asked),
                    "survey",
                    asked,
                    pack_tokens(tokens).tobytes(),
                    salt,
                    lora,
                    timeout_s=self._timeout_s,
                )
        except KVRayError as error:
            self._outcomes.surveyed("failed")
            self._breaker.fail(time.monotonic(), str(error))
            self._homes.pop(asked, None)
            if not had_failed:  # once, however long it lasts
                _log.warning("kvray does not say where prompts are: %s", error)
            return None
        self._outcomes.surveyed("answered")
        self._breaker.succeed()
        if had_failed:
            _log.info("kvray says where prompts are again")
        return read_survey(found)

    def _say_if_unknown(self, replicas: Sequence[str], *, is_unknown: bool) -> None:
        """Say once if no replica is known to the tier for long: then nothing is routed by it."""
        if not is_unknown:
            self._unknown_since, self._has_said = None, False
            return
        now = time.monotonic()
        since = self._unknown_since = self._unknown_since or now
        if now - since > _UNKNOWN_S and not self._has_said:
            self._has_said = True
            _log.warning(
                "The tier %r knows none of the replicas %s: requests go to the shorter queue. Give"
                " them these names in connector.replica; `kvray status` shows those it knows.",
                self._cluster_name,
                ", ".join(replicas[:3]),
            )

    def _find_homes(self, replicas: Sequence[str], now: float) -> None:
        """Look for the shards of replicas behind the request, if some are not known."""
        due = [name for name in replicas if self._homes.get(name, ("", 0.0))[1] <= now]
        if due and (self._finding is None or self._finding.done()):
            self._homes = {name: one for name, one in self._homes.items() if name in replicas}
            self._finding = asyncio.get_running_loop().create_task(self._find(due))

    async def _find(self, replicas: Sequence[str]) -> None:
        with tier_named(self._cluster_name):
            asked = (
                self._ask(LOOKUP_NAME, "replica", name, timeout_s=_HOME_TIMEOUT_S)
                for name in replicas
            )
            answers = await asyncio.gather(*asked, return_exceptions=True)
        now = time.monotonic()
        for name, answer in zip(replicas, answers, strict=True):
            shards = [] if isinstance(answer, BaseException) else [*answer.values()]
            shard = shards[0] if shards else self.home(name)
            self._homes[name] = shard, now + (_HOME_S if shards else _HOME_RETRY_S)
