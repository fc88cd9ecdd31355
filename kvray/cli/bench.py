"""What shows, measures and attacks kvray: `kvray bench`, `kvray demo` and `kvray chaos`."""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvray.cli.asking import duration, parse_option
from kvray.console.interrupts import Interrupts, masked
from kvray.console.options import ConfigOption, JsonOption, flag, option
from kvray.console.output import EXIT_FAILED, PlotOption, check_plot
from kvray.errors import needs
from kvray.lab.chaos.schedule import KINDS

if TYPE_CHECKING:
    from kvray.lab.report import Report

_WORKLOADS = ("conversations", "one-prefix", "no-prefix")
_FAULTS = tuple(kind.name for kind in KINDS)
QuickOption = Annotated[
    bool, flag("--quick", "Measure little: it shows that it works, not how fast.")
]
RepeatOption = Annotated[int | None, option("N", "Pairs to time.", 1, 10**6, default="by kind")]
BlockOption = Annotated[
    list[str] | None,
    option("SIZE", "Bytes of a block; may be repeated.", default="4MiB, 128KiB; tier: and 1MiB"),
]

bench = typer.Typer(
    name="bench",
    help="Measure the tier beside the bare work that no cache could save.",
    no_args_is_help=True,
)


def _runs(name: str, **taken: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that runs a module of the lab; `taken` names what it gets from above."""

    def decorate(declared: Callable[..., None]) -> Callable[..., None]:
        @wraps(declared)
        def command(
            *, as_json: bool, interrupts: Interrupts, plot: Path | None = None, **options: Any
        ) -> None:
            if plot is not None:
                check_plot(plot)
            for size in options.keys() & {"capacity", "arena"}:
                options[size] = parse_option(f"--{size}", options[size])
            if blocks := options.get("block"):
                options["block"] = [parse_option("--block", text) for text in blocks]
            extra = "engine" if name == "bench.gpu" else "demo"
            with masked(), needs(extra):  # importing starts threads
                from kvray.lab.runner import running

                module = import_module(f"kvray.lab.{name}")
                options |= {option: resolve_name(path) for option, path in taken.items()}
            with running(interrupts) as runner:
                report: Report = module.run(runner, **options)
            report.show(as_json=as_json, plot=plot)
            if report.has_failed:
                raise typer.Exit(EXIT_FAILED)

        told, kind = signature(declared, eval_str=True), Parameter.KEYWORD_ONLY
        more = (
            Parameter("as_json", kind, default=False, annotation=JsonOption),
            Parameter("interrupts", kind, annotation=Interrupts),
        )
        shown = told.replace(parameters=[*told.parameters.values(), *more])
        vars(command)["__signature__"] = shown
        return command

    return decorate


@bench.command()
@_runs("bench.local")
def local(
    capacity: Annotated[str, option("SIZE", "Shared memory of the bench's own arena.")] = "1GiB",
    repeat: RepeatOption = None,
    quick: QuickOption = False,
    config: ConfigOption = None,
) -> None:
    """Measure stores, retrieves and lookups in an arena of this node.

    It needs neither Ray nor a running tier: it makes an arena of its own under arena.dir, with
    processes that store and retrieve, and removes it again.
    """


@bench.command()
@_runs("bench.gpu")
def gpu(
    repeat: RepeatOption = None, quick: QuickOption = False, config: ConfigOption = None
) -> None:
    """Measure loads and saves of a GPU's KV cache, and prompts loaded instead of computed.

    It needs an NVIDIA GPU with 40 GiB and torch, and neither Ray nor a running tier: it makes an
    arena of its own under arena.dir, of some 9 GiB (2 with --quick), and removes it again.
    """


@bench.command()
@_runs("bench.staging")
def staging(repeat: RepeatOption = None, quick: QuickOption = False) -> None:
    """Measure how fast one node stages blocks from another, beside the bare transports.

    It starts two Ray nodes of its own on this machine, with an arena of 1 GiB each, and removes
    them again. It needs NIXL.
    """


@bench.command()
@_runs("bench.tier")
def tier(
    capacity: Annotated[str, option("SIZE", "Shared memory of the tier's arena.")] = "6GiB",
    block: BlockOption = None,
    processes: Annotated[
        list[int] | None,
        option("N", "Processes at once; may be repeated.", 1, 8, default="1, 2 .. as cores"),
    ] = None,
    seconds: Annotated[float, duration("Load for each number of processes.", 1, 3600)] = 60,
    config: ConfigOption = None,
) -> None:
    """Measure stores and retrieves through a tier that runs and whose arena is full.

    It starts a Ray and a tier of its own on this machine, and removes them again. Prefixes are
    Zipf-distributed, and twice as many as the arena holds.
    """


@bench.command()
@_runs("bench.nvme")
def nvme(
    disk: Annotated[
        Path | None,
        option("DIR", "Where the files go, on a disk.", names=["--dir"], default="TMPDIR"),
    ] = None,
    block: BlockOption = None,
    repeat: RepeatOption = None,
    quick: QuickOption = False,
    config: ConfigOption = None,
) -> None:
    """Measure stores to and cold retrieves from a disk, beside fio where that is installed.

    It needs neither Ray nor a running tier: it makes an arena of its own under arena.dir. A store
    and fio's file on the disk take 1 GiB at most. It removes them all again.
    """


@bench.command()
@_runs("bench.serving.serve", app="kvray.serve:app")
def serve(
    url: Annotated[
        list[str] | None, option("NAME=URL", "An endpoint; may be repeated. The first is judged.")
    ] = None,
    is_local: Annotated[
        bool, flag("--local", "Start three applications of kvray.serve and load them.")
    ] = False,
    trace: Annotated[
        Path | None, option("FILE", "Requests of a trace, as `kvray replay` reads it.")
    ] = None,
    workload: Annotated[
        list[str] | None,
        option(
            "NAME",
            f"{', '.join(_WORKLOADS)}; may be repeated.",
            default="conversations; --local: all",
            values=_WORKLOADS,
        ),
    ] = None,
    rate: Annotated[float, option("R", "Requests per second.", 0.01, 10_000)] = 0.5,
    seconds: Annotated[float, duration("Load of each round.", 1, 86_400)] = 60,
    rounds: Annotated[int, option("N", "Rounds, with other prompts each.", 1, 1000)] = 3,
    scale: Annotated[float, option("X", "Prompts of a trace are X times shorter.", 1, 4096)] = 16,
    tokens_max: Annotated[int, option("N", "Longer prompts lose their end.", 1, 10_000_000)] = 2048,
    block_tokens: Annotated[
        int | None,
        option("N", "Tokens of a trace's block.", 1, 1_000_000, default="the trace's, else 512"),
    ] = None,
    vocabulary: Annotated[
        int, option("N", "Token ids of prompts are below N.", 64, 10_000_000)
    ] = 16_384,
    answer_tokens: Annotated[int, option("N", "Tokens of an answer.", 1, 100_000)] = 8,
    in_time: Annotated[
        float, duration("A first token that comes later is too late.", 0.001, 86_400)
    ] = 2,
    timeout: Annotated[float, duration("A request that takes longer has failed.", 1, 3600)] = 120,
    replicas: Annotated[
        int | None,
        option("N", "Replicas behind each endpoint.", 1, 1000, default="all; --local: 3"),
    ] = None,
    model: Annotated[
        str | None,
        option("NAME", "The model.", default="what the endpoint lists; --local: smollm2"),
    ] = None,
    pool_blocks: Annotated[
        int, option("N", "--local: blocks of an engine's own pool.", 16, 10_000_000)
    ] = 128,
    capacity: Annotated[
        str, option("SIZE", "--local: shared memory of the tier's arena.")
    ] = "2GiB",
    start_timeout: Annotated[float, duration("--local: longest start.", 1, 3600)] = 300,
    plot: PlotOption = None,
    config: ConfigOption = None,
) -> None:
    """Load OpenAI-compatible endpoints with the same requests in turn, and compare their answers.

    The requests come when they are due, whatever the endpoint does. Endpoints must not share
    blocks. With --local it starts a Ray, a tier and three applications on this machine, and removes
    them again: kvray's router, Serve's own router with the tier, and without.
    """


@_runs("demo.play")
def demo(
    model: Annotated[
        str,
        option(
            "MODEL",
            "smollm2 (a real one, downloaded once), tiny (random weights, fast), or the path of a"
            " Llama-family checkpoint.",
            values=("smollm2", "tiny"),
        ),
    ] = "smollm2",
    engine: Annotated[
        str,
        option(
            "ENGINE", "reference, or vllm, where vLLM is installed.", values=("reference", "vllm")
        ),
    ] = "reference",
    arena: Annotated[str, option("SIZE", "Shared memory of the demo's tier.")] = "1GiB",
    plot: PlotOption = None,
) -> None:
    """Let two replicas of a language model share prefixes, and compare every text.

    It starts its own Ray and tier, beside others that run, and ends them. The exit status is 1 if
    a token differs from a run without kvray, or if a prefix was not shared.
    """


@_runs("chaos.play")
def chaos(
    duration: Annotated[float, duration("Length of the run with faults.", 20, 86_400)] = 60.0,
    seed: Annotated[int, option("N", "Decides the load and the faults.", 0, 2**32 - 1)] = 0,
    nodes: Annotated[int, option("N", "Ray nodes with a shard, on this machine.", 1, 8)] = 2,
    replicas: Annotated[int, option("N", "Engines, dealt to the nodes.", 1, 16)] = 2,
    gap: Annotated[float, duration("Mean time between two faults.", 0.1, 3600)] = 1.5,
    only: Annotated[
        list[str] | None,
        option(
            "KIND",
            f"Only this fault; may be repeated. {', '.join(_FAULTS)}.",
            default="all",
            values=_FAULTS,
        ),
    ] = None,
    network: Annotated[
        bool, typer.Option(help="Give the nodes addresses and cables of their own; needs root.")
    ] = True,
) -> None:
    """Serve from several nodes while parts of them are killed, stopped, cut off or filled up.

    It starts its own Ray, tier and engines on this machine, and ends them. It compares every answer
    with that of an engine without kvray. The exit status is 1 if a token was wrong, or if an engine
    died or a request hung without a fault that explains it.
    """
