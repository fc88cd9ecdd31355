"""What a router asks of the tier about a prompt: never for longer than a deadline."""

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvray.actors.lookup.delta import partition_of
from kvray.actors.names import LOOKUP_NAME, lookup_name
from kvray.actors.ray_glue.arguments import in_pieces
from kvray.actors.ray_glue.calls import tier_named
from kvray.actors.shard.actor_requests import Prompt
from kvray.actors.staging.peers import Ask
from kvray.breaker import Breaker
from kvray.errors import ConfigError, KVRayError
from kvray.identity.block import BlockKey, split_keys
from kvray.identity.keys import Tokens, chain_keys, pack_tokens, request_seed
from kvray.index import Run
from kvray.routing import Outcomes, Profile, Survey, survey_of

_log = logging.getLogger("ray.serve")

_HOME_S = 10.0
"""How long the node of a replica counts as known, and what was measured there."""
_HOME_RETRY_S = 1.0
_HOME_TIMEOUT_S = 2.0
_UNKNOWN_S = 30.0
_DISKS_AT_ONCE = 4


class Surveys:
    """Asks lookup and shards about prompts; for one event loop.

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
        self._profiles: dict[str, Profile] = {}  # by shard
        self._finding: asyncio.Task[None] | None = None
        self._unknown_since: float | None = None
        self._has_said = False

    def home(self, replica: str) -> str:
        """Return the shard with which a replica has registered; empty if that is not known."""
        return self._homes.get(replica, ("", 0.0))[0]

    def profile(self, replica: str) -> Profile | None:
        """Return what is known of a replica and its node; None if nothing is yet."""
        return self._profiles.get(self.home(replica))

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
        known = next((name for name in replicas if self.profile(name)), "")
        profile = self.profile(known)
        self._say_if_unknown(replicas, is_unknown=not any(map(self.home, replicas)))
        if profile is None or self._breaker.state(now) == "open":
            self._outcomes.surveyed("skipped")
            return None
        try:
            packed = pack_tokens(tokens)
            seed = request_seed(profile.namespace, salt=salt)
        except ConfigError as error:  # nobody was asked, so the breaker hears nothing
            _log.debug("a prompt has no keys: %s", error)
            return _nowhere(profile)
        self._breaker.begin(now)
        had_failed = self._breaker.error
        try:
            with tier_named(self._cluster_name):
                asked = packed, seed, salt, lora
                found = await self._look(known, profile, *asked, until=now + self._timeout_s)
        except ConfigError as error:  # the shard says it of this prompt, and is well
            _log.debug("a prompt has no keys: %s", error)
            found = _nowhere(profile)
        except KVRayError as error:
            self._outcomes.surveyed("failed")
            self._breaker.fail(time.monotonic(), str(error))
            self._homes.pop(known, None)
            if not had_failed:  # once, however long it lasts
                _log.warning("kvray does not say where prompts are: %s", error)
            return None
        self._outcomes.surveyed("answered")
        self._breaker.succeed()
        if had_failed:
            _log.info("kvray says where prompts are again")
        return found

    async def _look(
        self,
        replica: str,
        profile: Profile,
        packed: NDArray[np.int32],
        seed: bytes,
        salt: str | int | None,
        lora: str | None,
        *,
        until: float,
    ) -> Survey:
        if profile.namespace and lora is None:
            keys = chain_keys(packed, tokens_per_block=profile.tokens_per_block, seed=seed)
        else:
            asked = replica, packed.tobytes(), salt, lora
            prompt: Prompt = await self._call(self.home(replica), "prompt", *asked, until=until)
            keys = split_keys(prompt.keys)
        runs, on_disk = await self._ask_about(keys, profile, until) if keys else ([], {})
        return survey_of(profile, keys, runs, on_disk)

    async def _ask_about(
        self, keys: Sequence[BlockKey], profile: Profile, until: float
    ) -> tuple[list[Run], dict[str, bytes]]:
        """Return the holders of keys, and of holders with a disk what is only there.

        A few nodes with disks are asked along with the lookup, also in vain: one answer after the
        other takes twice as long. Only holders are waited for.
        """
        pieces = in_pieces(b"".join(keys))
        lookup = lookup_name(partition_of(keys[0], profile.num_partitions))
        disks = [name for name, one in self._profiles.items() if one.disk is not None]

        def ask(shard: str) -> "asyncio.Task[bytes]":
            asked = self._call(shard, "on_disk", profile.parts, *pieces, until=until)
            return asyncio.ensure_future(asked)

        masks = {name: ask(name) for name in disks if len(disks) <= _DISKS_AT_ONCE}
        try:
            runs: list[Run] = await self._call(lookup, "locate", *pieces, until=until)
            holders = {name for run in runs for name in run.holders}
            wanted = [name for name in disks if name in holders]
            masks.update((name, ask(name)) for name in wanted if name not in masks)
            found = await asyncio.gather(*(masks[name] for name in wanted))
        finally:
            for mask in masks.values():
                mask.cancel()
            await asyncio.gather(*masks.values(), return_exceptions=True)
        return runs, dict(zip(wanted, found, strict=True))

    async def _call(self, actor: str, method: str, *args: Any, until: float) -> Any:
        timeout_s = max(0.0, until - time.monotonic())
        return await self._ask(actor, method, *args, timeout_s=timeout_s)

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
                " them these names in connector.replica; `kvray ls` shows those it knows.",
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
            news: dict[str, str] = {}  # shard -> a replica there
            for name, answer in zip(replicas, answers, strict=True):
                shards = [] if isinstance(answer, BaseException) else [*answer.values()]
                shard = shards[0] if shards else self.home(name)
                self._homes[name] = shard, now + (_HOME_S if shards else _HOME_RETRY_S)
                if shards:
                    news[shard] = name
            asked = (
                self._ask(shard, "profile", name, timeout_s=_HOME_TIMEOUT_S)
                for shard, name in news.items()
            )
            profiles = await asyncio.gather(*asked, return_exceptions=True)
        for (shard, name), found in zip(news.items(), profiles, strict=True):
            if isinstance(found, BaseException):
                self._homes[name] = shard, now + _HOME_RETRY_S
            else:
                self._profiles[shard] = found
        homes = {shard for shard, _ in self._homes.values()}
        self._profiles = {name: one for name, one in self._profiles.items() if name in homes}


def _nowhere(profile: Profile) -> Survey:
    """Return that nobody has a prompt: it is the same work on every replica."""
    return survey_of(profile, [], [], {})
