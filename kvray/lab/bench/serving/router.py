"""`kvray bench router`: the time in which the router chooses a replica, the lookup included."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.random import default_rng

from kvray.actors.ray_glue.calls import ActorCalls, create_actor, tier_named
from kvray.actors.routers.surveys import Surveys
from kvray.config import KVRayConfig
from kvray.errors import KVRayError
from kvray.identity.block import Namespace
from kvray.identity.keys import chain_keys, pack_tokens, request_seed
from kvray.lab.bench.report import Report, Row, cores, time_rows, value_row
from kvray.lab.bench.runner import (
    LOCK_WAIT_S,
    TOKENS_PER_BLOCK,
    Duration,
    Runner,
    median_s,
    percentile_s,
    reserve_all,
)
from kvray.lab.bench.tier import own_settings, start_tier
from kvray.node import NodeLink, Registration, attach
from kvray.routing import Decisions, Outcomes, Place, Standings

_CAPACITY = 512 * 2**20
_BLOCK_BYTES = 4096
_NUM_PROMPTS = 32
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of a prompt's leading blocks, what the tier has: the prompts take turns."""
_WARM_UP = 50
_POOL_BLOCKS = 4096
_TOKENS_PER_S = 10_000.0
_DEADLINE_S = 0.02
"""As long as a router waits for the tier; here it waits longer, and those that it missed count."""
_TIMEOUT_S = 5.0
_HOMES_S = 60.0
_POLL_S = 0.05
_SEED = 20_000
_NAMESPACE = Namespace(
    model="key:bench@1",
    quantization="none",
    overrides="",
    kv_dtype="float32",
    num_layers=1,
    kv_factor=2,
    tokens_per_block=TOKENS_PER_BLOCK,
    part_bytes=_BLOCK_BYTES,
    num_parts=1,
    tp_layout="tp1",
    layer_groups="",
    attention_backend="bench",
    engine="bench",
)


def run(
    runner: Runner,
    *,
    config: Path | None,
    num_replicas: int,
    num_tokens: int,
    repeat: int | None,
    disk: Path | None,
    quick: bool,
) -> Report:
    """Start a tier that knows so many replicas, and choose among them as kvray's router does.

    Raises:
        KVRayError: Ray or the tier did not start, or the tier does not answer.
    """
    repeat = repeat or (20 if quick else 500)
    runner.show("Starting a tier", total=2 + repeat)
    settings = own_settings(config, capacity=_CAPACITY, slot_min=_BLOCK_BYTES)
    if disk is not None:
        settings = _with_disk(runner, settings, disk)
    start_tier(runner, settings)
    link = _attach(runner, settings)
    runner.advance()
    names = [f"bench-{number}" for number in range(num_replicas)]
    for name in names:
        link.register(Registration(replica=name, rank=0, namespace=_NAMESPACE, counters=dict))
    prompts = [_prompt(number, num_tokens) for number in range(_NUM_PROMPTS)]
    for number, tokens in enumerate(prompts):
        _store(link, tokens, _SHARES[number % len(_SHARES)])
    runner.advance()
    found = asyncio.run(_Choosing(runner, settings, names).take_all(prompts, repeat))
    return Report(
        rows=_rows(found),
        note=f"Prompts of {num_tokens:,} tokens, of which the tier has 0 to 100 %, for"
        f" {num_replicas} replicas, on {cores()}. The bare work is a call of a Ray actor that takes"
        " as many bytes and answers with as many. A router waits for the tier for"
        f" {1000 * _DEADLINE_S:.0f} ms at most; here it waited for the answers that were late.",
        facts={
            "replicas": num_replicas,
            "tokens": num_tokens,
            "choices": repeat,
            "has_disk": disk is not None,
        },
    )


def _with_disk(runner: Runner, settings: KVRayConfig, disk: Path) -> KVRayConfig:
    """Return the settings with a disk in a new directory of `disk`, removed with the run."""
    made = runner.stack.enter_context(TemporaryDirectory(prefix="kvray-bench-", dir=disk))
    sizes = {"capacity": _CAPACITY, "segment": _CAPACITY // 4, "free_reserve": 1}
    nvme = settings.nvme.model_copy(update={"dir": Path(made), **sizes})
    return settings.model_copy(update={"nvme": nvme})


def _attach(runner: Runner, settings: KVRayConfig) -> NodeLink:
    """Return this process's link to the tier; it ends with the run."""
    link = attach(settings.node_dir, label="bench", lock_wait_s=LOCK_WAIT_S, attach_retry_s=_POLL_S)
    runner.stack.callback(link.detach)
    return link


def _prompt(number: int, num_tokens: int) -> list[int]:
    tokens: list[int] = default_rng(_SEED + number).integers(0, 30_000, num_tokens).tolist()
    return tokens


def _store(link: NodeLink, tokens: Sequence[int], share: float) -> None:
    """Store the leading blocks of a prompt, as an engine would."""
    seed = request_seed(_NAMESPACE.digest())
    keys = chain_keys(tokens, tokens_per_block=TOKENS_PER_BLOCK, seed=seed)
    keys = keys[: int(share * len(keys))]
    arena = link.arena
    if arena is None:
        raise KVRayError("The bench's arena is gone; run it again.")
    if keys:
        made = reserve_all(arena, keys, block_bytes=_BLOCK_BYTES)
        pool = np.zeros((1, _BLOCK_BYTES), dtype=np.uint8)
        arena.commit(made, arena.write(made, pool, np.zeros(len(keys), dtype=np.int64)))


class _Bare:
    """An actor that answers with as many bytes as a shard that is asked about a prompt."""

    def take(self, tokens: bytes, num_bytes: int) -> bytes:
        """Return so many bytes."""
        return bytes(num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """Of one choice, and of the bare call beside it."""

    whole: Duration
    asking: Duration
    bare: Duration


class _Choosing:
    """One router's state, used as `KvRayRouter` does; for one event loop."""

    def __init__(self, runner: Runner, settings: KVRayConfig, names: list[str]) -> None:
        outcomes = Outcomes()
        self._runner = runner
        self._settings = settings
        self._names = names
        self._ask = ActorCalls()
        self._surveys = Surveys(
            self._ask, settings.cluster_name, timeout_s=_TIMEOUT_S, outcomes=outcomes
        )
        self._standings = Standings(pool_blocks=_POOL_BLOCKS, prefill_tokens_per_s=_TOKENS_PER_S)
        self._standings.retain(names)
        self._decisions = Decisions(self._standings, outcomes, lambda note: None)
        self._requests = count()

    async def take_all(self, prompts: Sequence[list[int]], repeat: int) -> list[_Times]:
        """Return the times of so many choices, after some that are not measured."""
        self._runner.show("Choosing")
        await self._wait_for_homes(prompts[0])
        with tier_named(self._settings.cluster_name):
            bare = create_actor(_Bare, f"bench-bare-{os.getpid()}")
        found = []
        for number in range(-_WARM_UP, repeat):
            tokens = prompts[number % len(prompts)]
            if number % 2:
                bare_time = await self._call_bare(bare, tokens)
                whole, asking = await self._choose(tokens)
            else:
                whole, asking = await self._choose(tokens)
                bare_time = await self._call_bare(bare, tokens)
            if number >= 0:
                found.append(_Times(whole=whole, asking=asking, bare=bare_time))
                self._runner.advance()
        return found

    async def _wait_for_homes(self, tokens: list[int]) -> None:
        deadline = time.monotonic() + _HOMES_S
        while not all(map(self._surveys.profile, self._names)):
            if time.monotonic() > deadline:
                raise KVRayError("The tier does not know the bench's replicas; run it again.")
            await self._surveys.survey(tokens, self._names)
            await asyncio.sleep(_POLL_S)

    async def _choose(self, tokens: list[int]) -> tuple[Duration, Duration]:
        """Choose as `KvRayRouter` does; return the time of it all, and that of the question."""
        request = str(next(self._requests))
        began = time.perf_counter()
        survey = await self._surveys.survey(tokens, self._names)
        asked_s = time.perf_counter() - began
        if survey is None:
            raise KVRayError(f"The tier did not answer within {_TIMEOUT_S:.0f} s; run it again.")
        now = time.monotonic()
        places = [
            Place(replica=name, node=self._surveys.home(name), prefill_tokens_per_s=_TOKENS_PER_S)
            for name in self._names
        ]
        choice = self._standings.choose(places, len(tokens), survey, now=now)
        self._decisions.begin(
            request,
            choice,
            survey,
            num_tokens=len(tokens),
            now=now,
            wall=time.time(),
            is_told=True,
        )
        whole = Duration(time.perf_counter() - began)
        self._decisions.sent(request, choice.replica, now=now)
        self._decisions.first_token(request, now=now)
        self._decisions.over(request, now=now)
        return whole, Duration(asked_s)

    async def _call_bare(self, bare: Any, tokens: list[int]) -> Duration:
        packed = pack_tokens(tokens).tobytes()
        began = time.perf_counter()
        answer = bare.take.remote(packed, len(tokens) // TOKENS_PER_BLOCK * 8).future()
        await asyncio.wait_for(asyncio.wrap_future(answer), _TIMEOUT_S)
        return Duration(time.perf_counter() - began)


def _rows(found: Sequence[_Times]) -> list[Row]:
    whole, bare = [one.whole for one in found], [one.bare for one in found]
    asking = [one.asking for one in found]
    deciding = [Duration(one.whole.seconds - one.asking.seconds) for one in found]
    rows = []
    for title, name, of in (
        ("choice of a replica", "p50", median_s),
        ("    99th percentile", "p99", partial(percentile_s, percent=99)),
        ("    longest", "max", partial(percentile_s, percent=100)),
    ):
        ours, floor = (1000 * of(times) for times in (whole, bare))
        figures = {f"router_ms_{name}": ours, f"router_bare_ms_{name}": floor}
        rows.append(
            Row(title=title, unit="ms", ours=ours, floor=floor, ratio=ours / floor, figures=figures)
        )
    decide_ms = 1000 * median_s(deciding)
    late = sum(one.seconds > _DEADLINE_S for one in asking) / len(asking)
    return [
        *rows,
        *time_rows("    of it, the question to the tier", "router_survey", asking),
        value_row("    of it, the choice itself", "ms", decide_ms, "router_decide_ms"),
        value_row("answers later than a router waits", "%", 100 * late, "router_late_percent"),
    ]
