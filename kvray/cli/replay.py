"""`kvray replay`: how policies would have served a trace of requests."""

from collections.abc import Sequence
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from re import fullmatch
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvray.console.boundary import boundary
from kvray.console.options import JsonOption, VerboseOption
from kvray.console.picture import PlotOption, check_plot, write_picture
from kvray.console.tables import printer
from kvray.errors import ConfigError

if TYPE_CHECKING:
    from kvray.lab.replay import Comparison, Plan

_MULTIPLES = {"": 1, "k": 1_000, "M": 1_000_000}
_CAPACITIES = "1k,5k,10k,30k,100k"
_PLAIN_WIDTH = 120

Names = list[str] | None


def replay(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="Mooncake's JSON lines, or agentic sessions: a file, a directory or an archive.",
        ),
    ],
    capacity: Annotated[
        Names,
        typer.Option(metavar="BLOCKS", help=f"Sizes of the host tier. Default: {_CAPACITIES}."),
    ] = None,
    policy: Annotated[
        Names, typer.Option(metavar="NAME", help="s3fifo or gittins, beside lru. Default: all.")
    ] = None,
    nvme: Annotated[
        str | None, typer.Option(metavar="BLOCKS", help="Put an NVMe tier of this size below.")
    ] = None,
    admission: Annotated[
        Names,
        typer.Option(metavar="NAME", help="NVMe admission: all, twice or likely. Default: each."),
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            **{"min": 1, "max": 1_000_000, "metavar": "N"},
            help="Tokens of a block, if the trace does not say it. Default: 512.",
        ),
    ] = None,
    concurrent: Annotated[
        int,
        typer.Option(
            **{"min": 1, "max": 1_000_000, "metavar": "N"},
            help="Sessions at the same time, if the trace has no start times.",
        ),
    ] = 16,
    seed: Annotated[
        int,
        typer.Option(
            min=0, max=2**32 - 1, metavar="N", help="Decides the order in which sessions begin."
        ),
    ] = 0,
    as_json: JsonOption = False,
    plot: PlotOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Replay a trace of requests, and compare how many blocks each policy would have found.

    Every policy stands beside LRU, beside Belady's optimum, which knows the future, and beside an
    infinite cache. No bytes are moved: it needs neither Ray nor a running tier.

    A size is a number of blocks, such as 5000, 5k or 1.5M. Names and sizes may be given
    repeatedly, or separated by commas.
    """
    with boundary(verbose=verbose) as interrupts:
        host_blocks = parse_sizes(capacity or [_CAPACITIES], "--capacity")
        nvme_blocks = _one_size(nvme, "--nvme") if nvme is not None else 0
        if admission and not nvme_blocks:
            raise ConfigError("--admission decides what goes to disk; give --nvme BLOCKS, too.")
        if plot is not None:
            check_plot(plot)
        with interrupts.masked():
            from kvray.lab.replay import Plan, report, simulator

        admissions = _names(admission, simulator.ADMISSIONS, "--admission")
        plan = Plan(
            policies=_names(policy, simulator.POLICIES, "--policy"),
            host_blocks=host_blocks,
            nvme_blocks=nvme_blocks,
            admissions=admissions if nvme_blocks else (None,),
        )
        layout = {"concurrent": concurrent, "seed": seed}
        found = _replay(trace, plan, block_tokens=block_tokens, **layout)
        if as_json:
            print(report.to_json(found, **layout))
        else:
            report.print_all(printer(_PLAIN_WIDTH), found)
        if plot is not None:
            from kvray.lab.replay.plot import make_figure

            write_picture(make_figure(found), plot)


def _replay(path: Path, plan: "Plan", **reading: Any) -> "Comparison":
    """Read a trace and replay it; a bar shows how far it is."""
    from rich.console import Console
    from rich.markup import escape

    from kvray.console.progress import counting_progress
    from kvray.lab.replay import compare, read_trace, simulator

    with counting_progress(Console(stderr=True, highlight=False)) as bar:
        task = bar.add_task("Reading", total=None)

        def show(title: str, done: int, total: int) -> None:
            bar.update(task, description=escape(title), completed=done, total=total)

        trace = read_trace(path, **reading)
        return compare(trace, plan, simulator.simulate, progress=show)


def parse_sizes(texts: list[str], option: str) -> list[int]:
    """Return numbers of blocks, ascending, each once; texts are such as `["1k,5k", "30000"]`."""
    return sorted({_one_size(text, option) for text in _split(texts)})


def _one_size(text: str, option: str) -> int:
    found = fullmatch(r"\s*(\d{1,12}(?:\.\d{1,6})?)([kM]?)\s*", text)
    size = Decimal(found[1]) * _MULTIPLES[found[2]] if found else Decimal(0)
    if size <= 0 or size != int(size):
        raise ConfigError(
            f"{option}: {text!r} is no number of blocks; write for example 5000, 5k or 1.5M."
        )
    return int(size)


def _names(given: Names, known: Sequence[str], option: str) -> Sequence[str]:
    """Return the names that an option has, or all known ones."""
    names = _split(given or [])
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"{option}: there is no {name!r}; {meant}known: {', '.join(known)}.")
    return names or known


def _split(texts: list[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",")]
