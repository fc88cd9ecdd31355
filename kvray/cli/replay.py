"""`kvray replay`: what policies would have found of a trace of requests."""

import sys
from decimal import Decimal
from pathlib import Path
from re import fullmatch
from typing import Annotated

import typer

from kvray.cli.boundary import boundary
from kvray.cli.options import VerboseOption
from kvray.cli.picture import PlotOption, check_plot
from kvray.errors import ConfigError

_MULTIPLES = {"": 1, "k": 1_000, "M": 1_000_000}
_PLAIN_WIDTH = 120


def replay(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="Mooncake's JSON lines, or agentic sessions: a file, a directory or an archive.",
        ),
    ],
    capacity: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BLOCKS",
            help="Sizes of the host tier in blocks, such as 5k or 1k,10k; else 1k,5k,10k,30k,100k.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What to replay it through, LRU in any case; else all policies.",
            show_default=False,
        ),
    ] = None,
    nvme: Annotated[
        str | None,
        typer.Option(
            metavar="BLOCKS", help="Put an NVMe tier of that size below.", show_default=False
        ),
    ] = None,
    admission: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What decides which blocks go to the NVMe tier; else all.",
            show_default=False,
        ),
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Tokens of a block where the trace does not say it; else 512.",
            show_default=False,
        ),
    ] = None,
    concurrent: Annotated[
        int,
        typer.Option(
            min=1,
            max=1_000_000,
            metavar="N",
            help="Sessions at the same time, where the trace does not say when they began.",
        ),
    ] = 16,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Of the order in which such sessions begin.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: PlotOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Replay a trace of requests, and compare policies by what they would have found.

    It needs neither Ray nor a running tier, and moves no bytes. Every policy stands beside LRU,
    beside Belady's optimum, which knows the future, and beside a cache without an end.
    """
    with boundary(verbose=verbose) as interrupts:
        host_blocks = parse_sizes(capacity or ["1k,5k,10k,30k,100k"], "--capacity")
        nvme_blocks = _one_size(nvme, "--nvme") if nvme is not None else 0
        if admission and not nvme_blocks:
            raise ConfigError("--admission decides what goes to disk; give --nvme BLOCKS, too.")
        if plot is not None:
            check_plot(plot)
        with interrupts.masked():
            from rich.console import Console

            from kvray.cli import replay_report, replay_run

        simulator = replay_run.load_simulator()
        plan = replay_run.make_plan(
            simulator,
            host_blocks=host_blocks,
            nvme_blocks=nvme_blocks,
            policies=_split(policy or []),
            admissions=_split(admission or []),
        )
        found = replay_run.run(
            trace,
            plan,
            simulator,
            reading={"block_tokens": block_tokens, "concurrent": concurrent, "seed": seed},
            console=Console(stderr=True, highlight=False),
        )
        if as_json:
            print(replay_report.to_json(found, concurrent=concurrent, seed=seed))
        else:
            width = None if sys.stdout.isatty() else _PLAIN_WIDTH
            replay_report.print_all(Console(highlight=False, width=width), found)
        if plot is not None:
            from kvray.cli.replay_plot import draw

            draw(found, plot)


def parse_sizes(texts: list[str], option: str) -> list[int]:
    """Return numbers of blocks, ascending, each once.

    Args:
        texts: such as `["1k,5k", "30000"]`.
        option: what errors call it.

    Raises:
        ConfigError: one of them is none.
    """
    return sorted({_one_size(text, option) for text in _split(texts)})


def _one_size(text: str, option: str) -> int:
    found = fullmatch(r"\s*(\d{1,12}(?:\.\d{1,6})?)([kM]?)\s*", text)
    size = Decimal(found[1]) * _MULTIPLES[found[2]] if found else Decimal(0)
    if size <= 0 or size != int(size):
        raise ConfigError(
            f"{option}: {text!r} is no number of blocks; write for example 5000, 5k or 1.5M."
        )
    return int(size)


def _split(texts: list[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",")]
