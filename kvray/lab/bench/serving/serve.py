"""`kvray bench serve`: the same load on OpenAI-compatible endpoints, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvray.errors import ConfigError
from kvray.lab.bench.runner import TOKENS_PER_BLOCK, Runner
from kvray.lab.bench.serving.figures import Round
from kvray.lab.bench.serving.fleet import Fleet
from kvray.lab.bench.serving.load import Due, Endpoint, ask_model, parse_endpoint, play
from kvray.lab.bench.serving.report import Section, ServingReport
from kvray.lab.bench.serving.workload import KINDS, Request, from_trace, generate, reusable_tokens
from kvray.lab.replay import Trace, read_trace

if TYPE_CHECKING:
    from ray.serve import Application

_WARM_UPS = 2
"""Requests for each replica, before the first round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much is asked, and how."""

    rate: float
    """Requests per second."""
    seconds: float
    rounds: int
    scale: float
    """Lengths of a trace are divided by it."""
    tokens_max: int
    """Longer prompts of a trace lose their end."""
    vocabulary: int
    """Token ids of prompts are below it."""
    answer_tokens: int
    in_time_s: float
    timeout_s: float

    @property
    def num_requests(self) -> int:
        """Of a round."""
        return max(1, round(self.rate * self.seconds))


def run(
    runner: Runner,
    *,
    urls: Sequence[str],
    trace: Path | None,
    workloads: Sequence[str],
    load: dict[str, Any],
    num_replicas: int,
    model: str | None,
    fleet: dict[str, Any] | None,
    app: Callable[[dict[str, Any]], Application],
) -> ServingReport:
    """Send each workload to all endpoints in turn.

    Args:
        runner: the run.
        urls: the endpoints, NAME=URL.
        trace: where requests come from in place of `workloads`.
        workloads: names of `KINDS`; none: conversations, and with a fleet all of them.
        load: the fields of `Load`.
        num_replicas: behind each endpoint; 0: those that answer.
        model: what to ask for; None: what the endpoints list.
        fleet: the fields of `Fleet`, which is started in place of `urls`; None: it is not.
        app: `kvray.serve.app`.

    Raises:
        KVRayError: an option is wrong, an endpoint does not answer, or the fleet did not start.
    """
    made = Load(**load)
    kinds = workloads or (["conversations"] if fleet is None else list(KINDS))
    sources = _sources(trace, kinds, made)
    if bool(urls) == (fleet is not None):
        raise ConfigError("Give the endpoints with --url, or --local.")
    if fleet is not None:
        started = Fleet(**fleet)
        endpoints = started.start(runner, app)
        return measure(runner, endpoints, sources, made, num_replicas=started.num_replicas)
    named = [parse_endpoint(url) for url in urls]
    if len({name for name, _ in named}) < len(named):
        raise ConfigError("Two endpoints have the same name; give each --url one of its own.")
    endpoints = [
        Endpoint(name=name, url=url, model=model or asyncio.run(ask_model(name, url)))
        for name, url in named
    ]
    return measure(runner, endpoints, sources, made, num_replicas=num_replicas)


def measure(
    runner: Runner,
    endpoints: Sequence[Endpoint],
    sources: dict[str, Callable[[int], list[Request]]],
    load: Load,
    *,
    num_replicas: int,
) -> ServingReport:
    """Play all rounds of all workloads; a source makes the requests of a round from its seed."""
    warm_ups = _WARM_UPS * max(1, num_replicas)
    per_endpoint = warm_ups + len(sources) * load.rounds * load.num_requests
    runner.show("Warming up", total=len(endpoints) * per_endpoint)
    for endpoint in endpoints:
        asyncio.run(_warm_up(runner, endpoint, load, warm_ups))
    sections = []
    for at, (name, source) in enumerate(sources.items()):
        rounds = [
            _round(
                runner,
                endpoints,
                source,
                load,
                title=f"{name}, round {number + 1} of {load.rounds}",
                number=at * load.rounds + number,
            )
            for number in range(load.rounds)
        ]
        sections.append(
            Section.of(name, rounds, in_time_s=load.in_time_s, num_replicas=num_replicas)
        )
    return ServingReport(
        sections=sections,
        facts={
            "rate": load.rate,
            "seconds": load.seconds,
            "rounds": load.rounds,
            "requests": load.num_requests,
            "answer_tokens": load.answer_tokens,
            "in_time_s": load.in_time_s,
            "replicas": num_replicas or None,
        },
    )


def _sources(
    trace: Path | None, workloads: Sequence[str], load: Load
) -> dict[str, Callable[[int], list[Request]]]:
    """Return the workloads by name; the requests of a trace are the same in each round."""
    if trace is not None:
        read = read_trace(trace)
        found = _of_trace(read, load)
        return {read.name: lambda seed: found}
    for name in workloads:
        if name not in KINDS:
            raise ConfigError(f"--workload {name}: give one of {', '.join(KINDS)}.")

    def of_kind(kind: str) -> Callable[[int], list[Request]]:
        return lambda seed: generate(
            kind, num_requests=load.num_requests, seconds=load.seconds, seed=seed
        )

    return {name: of_kind(name) for name in dict.fromkeys(workloads)}


def _of_trace(trace: Trace, load: Load) -> list[Request]:
    return from_trace(
        trace,
        num_requests=load.num_requests,
        seconds=load.seconds,
        scale=load.scale,
        tokens_max=load.tokens_max,
    )


async def _warm_up(runner: Runner, endpoint: Endpoint, load: Load, count: int) -> None:
    """Send some requests, one after the other, which nobody else's prompts begin with."""
    for request in generate("no-prefix", num_requests=count, seconds=0.0, seed=0):
        due = Due(at_s=0.0, tokens=request.tokens(0, vocabulary=load.vocabulary))
        await play(
            endpoint,
            [due],
            max_tokens=load.answer_tokens,
            timeout_s=load.timeout_s,
            advance=runner.advance,
        )


def _round(
    runner: Runner,
    endpoints: Sequence[Endpoint],
    source: Callable[[int], list[Request]],
    load: Load,
    *,
    title: str,
    number: int,
) -> Round:
    """Have the endpoints answer the same requests in turn; in each round another one begins."""
    seed = number + 1  # 0 is the warm-up's
    requests = [
        Due(at_s=one.at_s, tokens=one.tokens(seed, vocabulary=load.vocabulary))
        for one in source(seed)
    ]
    answers = {}
    first = number % len(endpoints)
    for endpoint in (*endpoints[first:], *endpoints[:first]):
        runner.show(f"{title}: {endpoint.name}")
        answers[endpoint.name] = asyncio.run(
            play(
                endpoint,
                requests,
                max_tokens=load.answer_tokens,
                timeout_s=load.timeout_s,
                advance=runner.advance,
            )
        )
    prompts = [due.tokens for due in requests]
    return Round(
        requests=requests,
        reusable=reusable_tokens(prompts, tokens_per_block=TOKENS_PER_BLOCK),
        answers={one.name: answers[one.name] for one in endpoints},
    )
