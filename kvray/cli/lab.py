"""`kvray demo` and `kvray chaos`: what shows kvray, and what attacks it, on Rays of their own."""

from typing import Annotated

import typer

from kvray.cli.asking import parse_option
from kvray.console.interrupts import Interrupts, masked
from kvray.console.options import JsonOption, option
from kvray.console.output import EXIT_FAILED, PlotOption, check_plot, printer
from kvray.errors import ConfigError


def demo(
    interrupts: Interrupts,
    model: Annotated[
        str,
        option(
            "MODEL",
            "smollm2 (a real one, downloaded once), tiny (random weights, fast), or the path of a"
            " Llama-family checkpoint.",
        ),
    ] = "smollm2",
    engine: Annotated[
        str, option("ENGINE", "reference, or vllm, where vLLM is installed.")
    ] = "reference",
    as_json: JsonOption = False,
    arena: Annotated[str, option("SIZE", "Shared memory of the demo's tier.")] = "1GiB",
    plot: PlotOption = None,
) -> None:
    """Let two replicas of a language model share prefixes, and compare every text.

    It starts its own Ray and tier, beside others that run, and ends them. The exit status is 1 if
    a token differs from a run without kvray, or if a prefix was not shared.
    """
    capacity = parse_option("--arena", arena)
    if plot is not None:
        check_plot(plot)
    with masked():
        from kvray.lab.demo.play import play

    console = printer(is_error=True)
    report = play(model, engine=engine, capacity=capacity, console=console, interrupts=interrupts)
    report.show(as_json=as_json, plot=plot)
    if report.facts["failures"]:
        raise typer.Exit(EXIT_FAILED)


def chaos(
    interrupts: Interrupts,
    duration: Annotated[
        float, option("SECONDS", "Length of the run with faults.", 20, 86_400)
    ] = 60.0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Decides the load and the faults.")
    ] = 0,
    nodes: Annotated[
        int, typer.Option(min=1, max=8, help="Ray nodes with a shard, on this machine.")
    ] = 2,
    replicas: Annotated[int, typer.Option(min=1, max=16, help="Engines, dealt to the nodes.")] = 2,
    gap: Annotated[float, option("SECONDS", "Mean time between two faults.", 0.1, 3600)] = 1.5,
    only: Annotated[
        list[str] | None,
        option(
            "KIND",
            "Only this fault; repeatable. kill_PART or stop_PART (a shard, mover, lookup,"
            " supervisor, engine or raylet), cut_link, cut_links, slow_link, fill_tmpfs, fill_disk,"
            " fill_arena, truncate, flip_bytes, drain, call_off, preempt or join.",
        ),
    ] = None,
    network: Annotated[
        bool, typer.Option(help="Give the nodes addresses and cables of their own; needs root.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Serve from several nodes while parts of them are killed, stopped, cut off or filled up.

    It starts its own Ray, tier and engines on this machine, and ends them. It compares every answer
    with that of an engine without kvray. The exit status is 1 if a token was wrong, or if an engine
    died or a request hung without a fault that explains it.
    """
    with masked():
        from kvray.lab.chaos.judge import chaos_report, has_passed
        from kvray.lab.chaos.network import why_impossible
        from kvray.lab.chaos.play import Options, play
        from kvray.lab.chaos.schedule import KINDS

    names = {kind.name for kind in KINDS}
    if unknown := sorted(set(only or ()) - names):
        raise ConfigError(
            f"There is no kind of fault {unknown[0]!r}; give one of {', '.join(sorted(names))}."
        )
    options = Options(
        duration_s=duration,
        seed=seed,
        num_nodes=nodes,
        num_replicas=replicas,
        gap_s=gap,
        kinds=tuple(only or ()),
        has_network=network and why_impossible() is None,
    )
    console = printer(is_error=True)
    found = play(options, console=console, interrupts=interrupts)
    chaos_report(found).show(as_json=as_json)
    if not has_passed(found):
        raise typer.Exit(EXIT_FAILED)
