"""`kvray demo`: the command."""

from typing import Annotated

import typer

from kvray.cli.asking import parse_option
from kvray.console.options import JsonOption, VerboseOption
from kvray.console.output import PlotOption, boundary, check_plot, printer

EXIT_FAILED = 1


def demo(
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="smollm2 (a real one, downloaded once), tiny (random weights, fast), or the path"
            " of a Llama-family checkpoint.",
        ),
    ] = "smollm2",
    engine: Annotated[
        str,
        typer.Option(metavar="ENGINE", help="reference, or vllm, where vLLM is installed."),
    ] = "reference",
    as_json: JsonOption = False,
    arena: Annotated[
        str, typer.Option(metavar="SIZE", help="Shared memory of the demo's tier.")
    ] = "1GiB",
    plot: PlotOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Let two replicas of a language model share prefixes, and compare every text.

    It starts its own Ray and tier, beside others that run, and ends them. The exit status is 1 if
    a token differs from a run without kvray, or if a prefix was not shared.
    """
    with boundary(verbose=verbose) as interrupts:
        capacity = parse_option("--arena", arena)
        if plot is not None:
            check_plot(plot)
        with interrupts.masked():
            from kvray.lab.demo.play import play

        console = printer(is_error=True)
        verdict, report = play(
            model, engine=engine, capacity=capacity, console=console, interrupts=interrupts
        )
        report.show(as_json=as_json, plot=plot)
    if verdict.failures:
        raise typer.Exit(EXIT_FAILED)
