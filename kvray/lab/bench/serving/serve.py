"""`kvray bench serve`: the same load on several endpoints in turn, or on three of its own."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import secrets
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kvray.errors import ConfigError, KVRayError
from kvray.lab.bench.serving.load import (
    KINDS,
    Answer,
    Due,
    Endpoint,
    Request,
    ask_model,
    from_trace,
    generate,
    parse_endpoint,
    play,
    reusable_tokens,
)
from kvray.lab.bench.serving.report import Round, Section, serving_report
from kvray.lab.bench.tier import own_settings
from kvray.lab.replay import read_trace
from kvray.lab.report import Report
from kvray.lab.runner import TOKENS_PER_BLOCK, Runner, is_soon

if TYPE_CHECKING:
    from ray.serve import Application

_POLL_S = 0.5
_ROUTERS = {"kvray": "kvray", "serve": "serve", "no-tier": "serve"}
"""Application -> its router. The first two use the tier, under model keys of their own: what one
has stored is not the other's."""
_WARM_UPS = 2
"""Requests for each replica, before the first round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of `kvray bench serve`, whose help says what they are."""

    rate: float
    seconds: float
    rounds: int
    scale: float
    tokens_max: int
    block_tokens: int | None  # of the trace; None: what it says
    vocabulary: int
    answer_tokens: int
    in_time: float
    timeout: float
    replicas: int | None  # None: those that answer
    model: str | None  # None: what the endpoints list
    config: Path | None
    pool_blocks: int
    capacity: int
    start_timeout: float

    @property
    def num_requests(self) -> int:
        """Of a round."""
        return max(1, round(self.rate * self.seconds))


def run(
    runner: Runner,
    *,
    url: Sequence[str] | None,
    is_local: bool,
    trace: Path | None,
    workload: Sequence[str] | None,
    app: Callable[[dict[str, Any]], Application],
    **options: Any,
) -> Report:
    """Send each workload to all endpoints in turn.

    The endpoints of `url` are NAME=URL; with `is_local` a fleet of `app`, `kvray.serve.app`, is
    started instead. `options` are the fields of `Options`. KVRayError: an option is wrong, an
    endpoint does not answer, or the fleet did not start.
    """
    made = Options(**options)
    sources = _sources(trace, workload or (list(KINDS) if is_local else ["conversations"]), made)
    if trace is not None and workload:
        raise ConfigError("Give either --trace or --workload.")
    if bool(url) == is_local:
        raise ConfigError("Give the endpoints with --url, or --local.")
    if is_local:
        made = replace(made, replicas=made.replicas or 3, model=made.model or "smollm2")
        return measure(runner, _start_fleet(runner, made, app), sources, made)
    named = [parse_endpoint(one) for one in url or ()]
    if len({name for name, _ in named}) < len(named):
        raise ConfigError("Two endpoints have the same name; give each --url one of its own.")
    endpoints = [
        Endpoint(name=name, url=where, model=made.model or asyncio.run(ask_model(name, where)))
        for name, where in named
    ]
    return measure(runner, endpoints, sources, made)


def measure(
    runner: Runner,
    endpoints: Sequence[Endpoint],
    sources: dict[str, Callable[..., list[Request]]],
    options: Options,
) -> Report:
    """Play all rounds of all workloads; a source makes the requests of a round from its seed.

    Each run has prompts of its own: those of the run before may be in an endpoint's cache.
    """
    run = secrets.randbits(32)
    warm_ups = _WARM_UPS * (options.replicas or 1)
    per_endpoint = warm_ups + len(sources) * options.rounds * options.num_requests
    runner.show("Warming up", total=len(endpoints) * per_endpoint)
    # Requests one after the other, which nobody else's prompts begin with.
    for endpoint in endpoints:
        for request in generate("no-prefix", num_requests=warm_ups, seconds=0.0, seed=0):
            tokens = request.tokens(run, vocabulary=options.vocabulary)
            _play(runner, endpoint, [Due(at_s=0.0, tokens=tokens)], options)
    limits: dict[str, Any] = {"in_time_s": options.in_time, "num_replicas": options.replicas or 0}
    sections = []
    for at, (name, source) in enumerate(sources.items()):
        rounds = []
        for number in range(options.rounds):
            title = f"{name}, round {number + 1} of {options.rounds}"
            seed = at * options.rounds + number + 1  # 0 is the warm-up's
            requests = [
                Due(at_s=one.at_s, tokens=one.tokens(run + seed, vocabulary=options.vocabulary))
                for one in source(seed=seed)
            ]
            first = (seed - 1) % len(endpoints)  # in each round another one begins
            rounds.append(_round(runner, endpoints, requests, options, title=title, first=first))
        sections.append(Section.of(name, rounds, **limits))
    names = ("rate", "seconds", "rounds", "answer_tokens", "replicas")
    facts = {name: getattr(options, name) for name in names}
    facts |= {"requests": options.num_requests, "in_time_s": options.in_time}
    return serving_report(sections, facts)


def _sources(
    trace: Path | None, workloads: Sequence[str], options: Options
) -> dict[str, Callable[..., list[Request]]]:
    """Return the workloads by name; those of a trace have the same requests in each round."""
    size: dict[str, Any] = {"num_requests": options.num_requests, "seconds": options.seconds}
    if trace is not None:
        read = read_trace(trace, block_tokens=options.block_tokens)
        found = from_trace(read, **size, scale=options.scale, tokens_max=options.tokens_max)
        return {read.name: lambda *, seed: found}
    for name in workloads:
        if name not in KINDS:
            raise ConfigError(f"--workload {name}: give one of {', '.join(KINDS)}.")
    return {name: partial(generate, name, **size) for name in workloads}


def _round(
    runner: Runner,
    endpoints: Sequence[Endpoint],
    requests: Sequence[Due],
    options: Options,
    *,
    title: str,
    first: int,
) -> Round:
    """Have the endpoints answer the same requests in turn, from the `first` on."""
    answers = {}
    for endpoint in (*endpoints[first:], *endpoints[:first]):
        runner.show(f"{title}: {endpoint.name}")
        answers[endpoint.name] = _play(runner, endpoint, requests, options)
    prompts = [due.tokens for due in requests]
    return Round(
        requests=requests,
        reusable=reusable_tokens(prompts, tokens_per_block=TOKENS_PER_BLOCK),
        answers={one.name: answers[one.name] for one in endpoints},
    )


def _play(
    runner: Runner, endpoint: Endpoint, requests: Sequence[Due], options: Options
) -> list[Answer]:
    limits: dict[str, Any] = {"max_tokens": options.answer_tokens, "timeout_s": options.timeout}
    return asyncio.run(play(endpoint, requests, **limits, advance=runner.advance))


def _start_fleet(
    runner: Runner, options: Options, app: Callable[[dict[str, Any]], Application]
) -> list[Endpoint]:
    """Start Ray, a tier and three applications, which end with the run; KVRayError: too slowly."""
    runner.show("Starting a tier")
    # Ray prints words about its workers, which are no part of the report.
    runner.stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
    settings = own_settings(options.config, capacity=options.capacity)
    launch = runner.start_tier(settings)
    assert launch.local is not None, "the tier is on a Ray of its own"
    directory = runner.make_directory(Path(tempfile.gettempdir()), "TMPDIR")
    from ray import serve

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    with runner.interrupts.held():
        runner.stack.callback(serve.shutdown)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
    for name, router in _ROUTERS.items():
        runner.show(f"Starting {name}")
        path = directory / f"{name}.yaml"
        # `no-tier` names a tier that is not up.
        made = {
            "cluster_name": settings.cluster_name + ("-none" if name == "no-tier" else ""),
            "arena": {"dir": str(settings.arena.dir)},
            "connector": {"model_key": f"bench-{name}"},
            "ray": {"address": launch.local.address},
        }
        path.write_text(yaml.safe_dump(made))
        arguments = {
            "engine": "reference",
            "model": options.model,
            "num_replicas": options.replicas,
            "router": router,
            "kvray_config": str(path),
            "engine_options": {"num_blocks": options.pool_blocks, "num_threads": 1},
            "pool_blocks": options.pool_blocks,
            **({"prefetch_timeout_s": 0} if name == "no-tier" else {}),  # nothing to fetch
        }
        target = serve.RunTarget(app(arguments), name, f"/{name}")
        serve.run_many([target], wait_for_applications_running=False)
        _wait(runner, serve.status, name, timeout_s=options.start_timeout)
    model, where = str(options.model), f"http://127.0.0.1:{port}"
    return [Endpoint(name=name, url=f"{where}/{name}", model=model) for name in _ROUTERS]


def _wait(runner: Runner, status: Callable[[], Any], name: str, *, timeout_s: float) -> None:
    def is_up() -> bool:
        runner.interrupts.check()
        found = status().applications.get(name)
        if found is not None and found.status == "DEPLOY_FAILED":
            raise ConfigError(f"{name} did not start: {found.message}")
        return found is not None and found.status == "RUNNING"

    if not is_soon(is_up, timeout_s, poll_s=_POLL_S):
        raise KVRayError(f"{name} did not start within {timeout_s:.0f} s; give fewer --replicas.")
