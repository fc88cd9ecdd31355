"""`kvray bench serve`: what a tier and its router gain."""

from pathlib import Path
from typing import Annotated

import typer

from kvray.cli.bench.running import run_bench
from kvray.console.options import ConfigOption, JsonOption, VerboseOption
from kvray.console.output import PlotOption


def serve(
    url: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=URL", help="An endpoint; may be repeated. The first is judged."),
    ] = None,
    is_local: Annotated[
        bool, typer.Option("--local", help="Start three applications of kvray.serve and load them.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Requests of a trace, as `kvray replay` reads it."),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="conversations, one-prefix or no-prefix; may be repeated. [conversations; --local:"
            " all]",
        ),
    ] = None,
    rate: Annotated[
        float, typer.Option(min=0.01, max=10_000, metavar="R", help="Requests per second.")
    ] = 0.5,
    seconds: Annotated[
        float, typer.Option(min=1, max=86_400, metavar="S", help="Load of each round.")
    ] = 60,
    rounds: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="Rounds, with other prompts each.")
    ] = 3,
    scale: Annotated[
        float,
        typer.Option(min=1, max=4096, metavar="X", help="Prompts of a trace are X times shorter."),
    ] = 16,
    tokens_max: Annotated[
        int,
        typer.Option(min=1, max=10_000_000, metavar="N", help="Longer prompts lose their end."),
    ] = 2048,
    vocabulary: Annotated[
        int,
        typer.Option(min=64, max=10_000_000, metavar="N", help="Token ids of prompts are below N."),
    ] = 16_384,
    answer_tokens: Annotated[
        int, typer.Option(min=1, max=100_000, metavar="N", help="Tokens of an answer.")
    ] = 8,
    in_time: Annotated[
        float,
        typer.Option(
            min=0.001, max=86_400, metavar="S", help="A first token that comes later is too late."
        ),
    ] = 2,
    timeout: Annotated[
        float,
        typer.Option(min=1, max=3600, metavar="S", help="A request that takes longer has failed."),
    ] = 120,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1000,
            metavar="N",
            help="Replicas behind each endpoint. [those that answer; --local: 3]",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="[what the endpoint lists; --local: smollm2]"),
    ] = None,
    pool_blocks: Annotated[
        int,
        typer.Option(
            min=16, max=10_000_000, metavar="N", help="--local: blocks of an engine's own pool."
        ),
    ] = 128,
    capacity: Annotated[
        str, typer.Option(metavar="SIZE", help="--local: shared memory of the tier's arena.")
    ] = "2GiB",
    start_timeout: Annotated[
        float, typer.Option(min=1, max=3600, metavar="S", help="--local: longest start.")
    ] = 300,
    as_json: JsonOption = False,
    plot: PlotOption = None,
    config: ConfigOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Load OpenAI-compatible endpoints with the same requests in turn, and compare their answers.

    The requests come when they are due, whatever the endpoint does. Endpoints must not share
    blocks. With --local it starts a Ray, a tier and three applications on this machine, and removes
    them again: kvray's router, Serve's own router with the tier, and without.
    """
    fleet = {
        "config": config,
        "model": model or "smollm2",
        "num_replicas": replicas or 3,
        "num_blocks": pool_blocks,
        "capacity": capacity,
        "start_timeout_s": start_timeout,
    }
    load = {
        "rate": rate,
        "seconds": seconds,
        "rounds": rounds,
        "scale": scale,
        "tokens_max": tokens_max,
        "vocabulary": vocabulary,
        "answer_tokens": answer_tokens,
        "in_time_s": in_time,
        "timeout_s": timeout,
    }
    options = {
        "urls": url or [],
        "trace": trace,
        "workloads": workload or [],
        "load": load,
        "num_replicas": replicas or 0,
        "model": model,
        "fleet": fleet if is_local else None,
    }
    run_bench(
        "serving.serve",
        options,
        as_json=as_json,
        plot=plot,
        verbose=verbose,
        taken={"app": "kvray.serve:app"},
    )
