"""The commands of `kvray bench`; `serve` is in a module of its own."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvray.cli.bench.running import QuickOption, run_bench
from kvray.cli.bench.serving import serve
from kvray.console.options import ConfigOption, JsonOption, VerboseOption
from kvray.console.output import PlotOption

RepeatOption = Annotated[
    int | None,
    typer.Option(min=1, max=1_000_000, metavar="N", help="Pairs of each measurement."),
]
BlockOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SIZE", help="Bytes of a block; may be repeated. [4MiB and 128KiB; tier: and 1MiB]"
    ),
]

bench = typer.Typer(
    name="bench",
    help="Measure the tier beside the bare work that no cache could save.",
    no_args_is_help=True,
)


@bench.command()
def local(
    capacity: Annotated[
        str, typer.Option(metavar="SIZE", help="Shared memory of the bench's own arena.")
    ] = "1GiB",
    repeat: RepeatOption = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
    quick: QuickOption = False,
    config: ConfigOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Measure stores, retrieves and lookups in an arena of this node.

    It needs neither Ray nor a running tier: it makes an arena of its own under arena.dir, with
    processes that store and retrieve, and removes it again.
    """
    options = {"config": config, "capacity": capacity, "repeat": repeat, "quick": quick}
    run_bench("local", options, as_json=as_json, plot=plot, verbose=verbose)


@bench.command()
def gpu(
    repeat: RepeatOption = None,
    as_json: JsonOption = False,
    quick: QuickOption = False,
    config: ConfigOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Measure loads and saves of a GPU's KV cache, and prompts loaded instead of computed.

    It needs an NVIDIA GPU and torch, and neither Ray nor a running tier: it makes an arena of its
    own under arena.dir, of some 4 GiB, and removes it again.
    """
    options = {"config": config, "repeat": repeat, "quick": quick}
    run_bench("gpu.run", options, as_json=as_json, verbose=verbose)


@bench.command()
def staging(
    repeat: RepeatOption = None,
    as_json: JsonOption = False,
    quick: QuickOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Measure how fast one node stages blocks from another, beside the bare transports.

    It starts two Ray nodes of its own on this machine, with an arena of 1 GiB each, and removes
    them again. It needs NIXL.
    """
    run_bench("staging", {"repeat": repeat, "quick": quick}, as_json=as_json, verbose=verbose)


@bench.command()
def tier(
    capacity: Annotated[
        str, typer.Option(metavar="SIZE", help="Shared memory of the tier's arena.")
    ] = "6GiB",
    block: BlockOption = None,
    processes: Annotated[
        list[int] | None,
        typer.Option(
            min=1, max=8, metavar="N", help="Processes at once; may be repeated. [1, 2 .. as cores]"
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(min=1, max=3600, metavar="S", help="Load for each number of processes."),
    ] = 60,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Measure stores and retrieves through a tier that runs and whose arena is full.

    It starts a Ray and a tier of its own on this machine, and removes them again. Prefixes are
    Zipf-distributed, and twice as many as the arena holds.
    """
    options: dict[str, Any] = {"config": config, "capacity": capacity, "blocks": block or ()}
    options |= {"processes": processes or (), "seconds": seconds}
    run_bench("tier", options, as_json=as_json, verbose=verbose)


@bench.command()
def nvme(
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", metavar="DIR", help="Where the segment files go, on a disk; else in TMPDIR."
        ),
    ] = None,
    arena_directory: Annotated[
        Path | None,
        typer.Option(
            "--arena-dir", metavar="DIR", help="A tmpfs with huge pages; else root mounts one."
        ),
    ] = None,
    block: BlockOption = None,
    repeat: RepeatOption = None,
    as_json: JsonOption = False,
    quick: QuickOption = False,
    config: ConfigOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Measure stores to and cold retrieves from a disk, beside bare direct I/O.

    It needs neither Ray nor a running tier: it makes an arena of its own under arena.dir, and one
    with huge pages where the machine has them. A store and a bare file on the disk take 1 GiB at
    most. It removes them all again.
    """
    options = {"config": config, "blocks": block or (), "repeat": repeat, "quick": quick}
    options |= {"disk": directory, "huge_dir": arena_directory}
    run_bench("nvme", options, as_json=as_json, verbose=verbose)


bench.command()(serve)
