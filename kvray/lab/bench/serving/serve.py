"""`kvray bench serve`: the same load on OpenAI-compatible endpoints, one after the other.

With `--local` the endpoints are a tier and three applications of kvray.serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kvray.config import KVRayConfig
from kvray.errors import ConfigError, KVRayError
from kvray.lab.bench.runner import TOKENS_PER_BLOCK, Runner, parse_option
from kvray.lab.bench.serving.load import Due, Endpoint, ask_model, parse_endpoint, play
from kvray.lab.bench.serving.report import Round, Section, ServingReport
from kvray.lab.bench.serving.workload import KINDS, Request, from_trace, generate, reusable_tokens
from kvray.lab.bench.tier import own_settings, start_tier
from kvray.lab.replay import Trace, read_trace

if TYPE_CHECKING:
    from ray.serve import Application

    MakeApp = Callable[[dict[str, Any]], Application]
    from ray.serve import Application


_POLL_S = 0.5
_ROUTERS = {"kvray": "kvray", "serve": "serve", "no-tier": "serve"}
"""Application -> its router. The first two use the tier, under model keys of their own: what one
has stored is not the other's."""
_WARM_UPS = 2
"""Requests for each replica, before the first round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What is started."""

    config: Path | None
    model: str
    num_replicas: int
    num_blocks: int
    """Of each engine's own pool."""
    capacity: str
    """Of the tier's arena."""
    start_timeout_s: float

    def start(self, runner: Runner, app: MakeApp) -> list[Endpoint]:
        """Start Ray, the tier and the applications, which end with the run.

        Raises:
            KVRayError: something did not start in time.
        """
        runner.show("Starting a tier")
        # Ray prints words about its workers, which are no part of the report.
        runner.stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        capacity = parse_option("--capacity", self.capacity)
        settings = own_settings(self.config, capacity=capacity)
        launch = start_tier(runner, settings)
        assert launch.local is not None, "the tier is on a Ray of its own"
        directory = runner.make_directory(Path(tempfile.gettempdir()))
        from ray import serve

        port = _free_port()
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        with runner.interrupts.held():
            runner.stack.callback(serve.shutdown)
            serve.start(http_options={"host": "127.0.0.1", "port": port})
        for name in _ROUTERS:
            runner.show(f"Starting {name}")
            path = self._write_config(settings, directory, name, launch.local.address)
            target = serve.RunTarget(app(self._arguments(name, path)), name, f"/{name}")
            serve.run_many([target], wait_for_applications_running=False)
            self._wait(runner, serve.status, name)
        return [
            Endpoint(name=name, url=f"http://127.0.0.1:{port}/{name}", model=self.model)
            for name in _ROUTERS
        ]

    def _arguments(self, name: str, config: Path) -> dict[str, Any]:
        """Return the arguments of an application."""
        options = {"num_blocks": self.num_blocks, "num_threads": 1}
        nothing_to_fetch = {"prefetch_timeout_s": 0} if name == "no-tier" else {}
        return {
            **nothing_to_fetch,
            "engine": "reference",
            "model": self.model,
            "num_replicas": self.num_replicas,
            "router": _ROUTERS[name],
            "kvray_config": str(config),
            "engine_options": options,
            "pool_blocks": self.num_blocks,
        }

    def _write_config(
        self, settings: KVRayConfig, directory: Path, name: str, address: str
    ) -> Path:
        """Write the kvray.yaml of an application; that of `no-tier` names a tier that is not up."""
        cluster_name = settings.cluster_name + ("-none" if name == "no-tier" else "")
        made = {
            "cluster_name": cluster_name,
            "arena": {"dir": str(settings.arena.dir)},
            "connector": {"model_key": f"bench-{name}"},
            "ray": {"address": address},
        }
        path = directory / f"{name}.yaml"
        path.write_text(yaml.safe_dump(made))
        return path

    def _wait(self, runner: Runner, status: Callable[[], Any], name: str) -> None:
        """Wait until an application runs."""
        deadline = time.monotonic() + self.start_timeout_s
        while time.monotonic() < deadline:
            runner.interrupts.check()
            found = status().applications.get(name)
            if found is not None and found.status == "RUNNING":
                return
            if found is not None and found.status == "DEPLOY_FAILED":
                raise ConfigError(f"{name} did not start: {found.message}")
            time.sleep(_POLL_S)
        raise KVRayError(
            f"{name} did not start within {self.start_timeout_s:.0f} s; give fewer --replicas."
        )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


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
