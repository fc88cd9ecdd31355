"""`kvray chaos`: the command."""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvray.cli.boundary import boundary
from kvray.cli.interrupts import Interrupts
from kvray.cli.options import VerboseOption
from kvray.errors import ConfigError

if TYPE_CHECKING:
    from kvray.cli.chaos.play import Options

EXIT_FAILED = 1
_PLAIN_WIDTH = 130


def chaos(
    duration: Annotated[
        float, typer.Option(metavar="SECONDS", min=20, help="Length of the run with faults.")
    ] = 60.0,
    seed: Annotated[int, typer.Option(min=0, help="Decides the load and the faults.")] = 0,
    nodes: Annotated[
        int, typer.Option(min=1, max=8, help="Ray nodes with a shard, on this machine.")
    ] = 2,
    replicas: Annotated[int, typer.Option(min=1, max=16, help="Engines, dealt to the nodes.")] = 2,
    gap: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Mean time between two faults.")
    ] = 1.5,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help="Faults of this kind alone; may be given repeatedly."),
    ] = None,
    network: Annotated[
        bool, typer.Option(help="Give the nodes addresses and cables of their own; needs root.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    verbose: VerboseOption = False,
) -> None:
    """Serve from several nodes while parts of them are killed, stopped, cut off or filled up.

    It starts a Ray, a tier and engines of its own on this machine, and ends them. Every answer is
    compared with that of an engine without kvray. The exit status is 1 if a token was wrong, an
    engine died or a request hung that no fault had killed.
    """
    with boundary(verbose=verbose) as interrupts:
        with interrupts.masked():
            from kvray.cli.chaos.network import why_impossible
            from kvray.cli.chaos.play import Options
            from kvray.cli.chaos.schedule import KINDS

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
        passed = _run(options, as_json=as_json, interrupts=interrupts)
    if not passed:
        raise typer.Exit(EXIT_FAILED)


def _run(options: "Options", *, as_json: bool, interrupts: Interrupts) -> bool:
    from kvray.cli.chaos import play, report
    from kvray.cli.chaos.judge import has_passed

    console = Console(stderr=True, highlight=False)
    found = play.play(options, console=console, interrupts=interrupts)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        width = None if sys.stdout.isatty() else _PLAIN_WIDTH
        report.print_all(Console(highlight=False, width=width), found)
    return has_passed(found)
