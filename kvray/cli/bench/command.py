"""`kvray bench`: the commands."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvray.cli.boundary import boundary
from kvray.cli.interrupts import Interrupts
from kvray.cli.options import ConfigOption, VerboseOption
from kvray.cli.picture import PlotOption, check_plot
from kvray.config import KVRayConfig, load_config, parse_size
from kvray.errors import ConfigError

_PLAIN_WIDTH = 110

bench = typer.Typer(
    name="bench",
    help="Measure the tier beside the bare work that nothing could save.",
    no_args_is_help=True,
)


@bench.command()
def local(
    capacity: Annotated[
        str, typer.Option(metavar="SIZE", help="Shared memory of the bench's own arena.")
    ] = "1GiB",
    repeat: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Pairs of each measurement; else as many as settle it."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: PlotOption = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer blocks and pairs: a look, no measurement.")
    ] = False,
    config: ConfigOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Measure stores, retrieves and lookups in an arena of this node.

    It needs neither Ray nor a running tier: it makes an arena of its own under arena.dir, with
    processes that store and retrieve, and removes it again.
    """
    with boundary(verbose=verbose) as interrupts:
        settings = load_config(config)
        if plot is not None:
            check_plot(plot)
        _run(
            settings,
            capacity=_parse(capacity, "--capacity"),
            repeat=repeat,
            as_json=as_json,
            plot=plot,
            quick=quick,
            interrupts=interrupts,
        )


@bench.command()
def gpu(
    repeat: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Pairs of each measurement; else 15, and 5 prompts."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer prompts and pairs: a look, no measurement.")
    ] = False,
    config: ConfigOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Measure loads and saves of a GPU's KV cache, and prompts loaded instead of computed.

    It needs an NVIDIA GPU and torch, and neither Ray nor a running tier: it makes an arena of its
    own under arena.dir, of some 4 GiB, and removes it again.
    """
    with boundary(verbose=verbose) as interrupts:
        settings = load_config(config)
        _run_gpu(settings, repeat=repeat, as_json=as_json, quick=quick, interrupts=interrupts)


def _run_gpu(
    settings: KVRayConfig,
    *,
    repeat: int | None,
    as_json: bool,
    quick: bool,
    interrupts: Interrupts,
) -> None:
    """Measure on the first GPU, and show what was found."""
    with interrupts.masked():
        from kvray.cli.bench.gpu import GpuScale, run
        from kvray.cli.bench.gpu_machine import Machine
        from kvray.cli.bench.gpu_report import print_all, to_json

    scale = GpuScale.fit(repeat=repeat, quick=quick)
    console = Console(stderr=True, highlight=False)
    found = run(
        scale,
        Machine("cuda:0"),
        directory=settings.arena.dir,
        console=console,
        interrupts=interrupts,
    )
    if as_json:
        print(to_json(found, scale))
    else:
        width = None if sys.stdout.isatty() else _PLAIN_WIDTH
        print_all(Console(highlight=False, width=width), found, scale)


@bench.command()
def connector(
    requests: Annotated[
        int, typer.Option(min=10, metavar="N", help="Requests of each measurement.")
    ] = 500,
    block: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes that one rank keeps of a block.")
    ] = "4KiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few requests: a look, no measurement.")
    ] = False,
    config: ConfigOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Measure what a new request costs the thread of an engine that asks the connector.

    The reference engine's own executor makes the calls, with a model that computes nothing. It
    needs neither Ray nor a running tier, and leaves nothing behind.
    """
    with boundary(verbose=verbose) as interrupts:
        settings = load_config(config)
        block_bytes = _parse(block, "--block")
        with interrupts.masked():
            from kvray.cli.bench.connector import measure_connector
        found = measure_connector(
            settings,
            num_requests=10 if quick else requests,
            block_bytes=block_bytes,
            console=Console(stderr=True, highlight=False),
            interrupts=interrupts,
        )
        if as_json:
            print(found.to_json())
        else:
            width = None if sys.stdout.isatty() else _PLAIN_WIDTH
            found.print_all(Console(highlight=False, width=width))


@bench.command()
def lookup(
    entries: Annotated[
        int, typer.Option(min=20_000, metavar="N", help="Blocks that the lookup knows.")
    ] = 5_000_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    verbose: VerboseOption = False,
) -> None:
    """Measure the memory of the lookup's index, and how long queries and announcements take.

    It needs neither Ray nor a running tier. 5 million entries take some 700 MB.
    """
    with boundary(verbose=verbose) as interrupts:
        with interrupts.masked():
            from kvray.cli.bench.lookup import measure_lookup
        console = Console(stderr=True, highlight=False)
        found = measure_lookup(entries, console=console, interrupts=interrupts)
        if as_json:
            print(found.to_json())
        else:
            width = None if sys.stdout.isatty() else _PLAIN_WIDTH
            found.print_all(Console(highlight=False, width=width))


@bench.command()
def staging(
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Pairs of each measurement.")] = 9,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer blocks and pairs: a look, no measurement.")
    ] = False,
    verbose: VerboseOption = False,
) -> None:
    """Measure how fast blocks come from one node to another, beside the bare transports.

    It starts two Ray nodes of its own on this machine, with an arena of 1 GiB each, and removes
    them again. It needs NIXL.
    """
    with boundary(verbose=verbose) as interrupts:
        with interrupts.masked():
            from kvray.cli.bench.staging import NUM_BLOCKS, measure_staging
        found = measure_staging(
            num_blocks=NUM_BLOCKS // 8 if quick else NUM_BLOCKS,
            repeat=min(repeat, 3) if quick else repeat,
            console=Console(stderr=True, highlight=False),
            interrupts=interrupts,
        )
        if as_json:
            print(found.to_json())
        else:
            width = None if sys.stdout.isatty() else _PLAIN_WIDTH
            found.print_all(Console(highlight=False, width=width))


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
    block: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZE", help="Bytes of a block; may be repeated. [4MiB and 128KiB]"),
    ] = None,
    repeat: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Pairs of each measurement; else 11.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer bytes and pairs: a look, no measurement.")
    ] = False,
    config: ConfigOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Measure stores to and cold retrieves from a disk, beside bare direct I/O.

    It needs neither Ray nor a running tier: it makes an arena of its own under arena.dir, and one
    with huge pages where that can be had, a store and a bare file on the disk, 1 GiB at most, and
    removes them all again.
    """
    with boundary(verbose=verbose) as interrupts:
        settings = load_config(config)
        sizes = [_parse(one, "--block") for one in block or ()]
        with interrupts.masked():
            from kvray.cli.bench import nvme as measured
        found = measured.measure_nvme(
            measured.NvmeBench(
                num_bytes=measured.QUICK_BYTES if quick else measured.NUM_BYTES,
                block_sizes=sizes or measured.BLOCK_SIZES,
                repeat=repeat or (measured.QUICK_REPEAT if quick else measured.REPEAT),
                disk=directory,
                arena=settings.arena.dir,
                huge=arena_directory,
            ),
            console=Console(stderr=True, highlight=False),
            interrupts=interrupts,
        )
        if as_json:
            print(found.to_json())
        else:
            width = None if sys.stdout.isatty() else _PLAIN_WIDTH
            found.print_all(Console(highlight=False, width=width))


def _run(
    settings: KVRayConfig,
    *,
    capacity: int,
    repeat: int | None,
    as_json: bool,
    plot: Path | None,
    quick: bool,
    interrupts: Interrupts,
) -> None:
    """Measure, and show what was found."""
    with interrupts.masked():
        from kvray.cli.bench.play import play
        from kvray.cli.bench.report import print_all, to_json
        from kvray.cli.bench.scale import Scale

    scale = Scale.fit(capacity, repeat=repeat, quick=quick)
    console = Console(stderr=True, highlight=False)
    results = play(scale, directory=settings.arena.dir, console=console, interrupts=interrupts)
    if as_json:
        print(to_json(results, scale))
    else:
        width = None if sys.stdout.isatty() else _PLAIN_WIDTH
        print_all(Console(highlight=False, width=width), results, scale)
    if plot is not None:
        from kvray.cli.bench.plot import draw

        draw(results, plot)


def _parse(text: str, option: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}.") from None
