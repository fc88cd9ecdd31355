"""`kvray verify`: check every block of this node's arena while it is in use."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from kvray.config import KVRayConfig, format_size, load_config
from kvray.console.interrupts import Interrupts
from kvray.console.options import ConfigOption, JsonOption, VerboseOption
from kvray.console.output import boundary, empty_table, printer
from kvray.errors import ShardUnavailable

EXIT_CORRUPT = 1
_NAMES_MAX = 20


def verify(
    config: ConfigOption = None,
    all_arenas: Annotated[
        bool, typer.Option("--all", help="Check every arena of this user under arena.dir.")
    ] = False,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Check every stored block of this node, and the tables that find it.

    Engines go on meanwhile. A block with wrong bytes is quarantined and never served. The shard
    mends the tables. Needs no Ray.
    """
    with boundary(verbose=verbose) as interrupts:
        settings = load_config(config)
        directories = _directories(settings, all_arenas=all_arenas)
        found, errors = _verify_each(directories, settings.arena.lock_wait_s, interrupts)
        if as_json:
            print(json.dumps({"arenas": found, "errors": [str(error) for error in errors]}))
        elif found or not errors:
            _print(found, settings.arena.dir)
        if any(arena["corrupt"] or arena["damage"] for arena in found):
            raise typer.Exit(EXIT_CORRUPT)
        if errors:
            raise errors[0]


def _directories(settings: KVRayConfig, *, all_arenas: bool) -> list[Path]:
    if not all_arenas:
        return [settings.node_dir]
    from kvray.actors.owner.ownership import is_own
    from kvray.store.arena.file import ARENA_FILE

    found = sorted(settings.arena.dir.glob("kvray-*"))
    return [path for path in found if is_own(path) and (path / ARENA_FILE).exists()]


def _verify_each(
    directories: list[Path], lock_wait_s: float, interrupts: Interrupts
) -> tuple[list[dict[str, Any]], list[ShardUnavailable]]:
    """Check every arena that can be checked; return the results, and the errors of the others."""
    found: list[dict[str, Any]] = []
    errors: list[ShardUnavailable] = []
    for directory in directories:
        try:
            # A signal waits for the end of a batch: no lease may stay behind.
            with interrupts.held():
                found.append(_verify(directory, lock_wait_s, interrupts))
        except ShardUnavailable as error:
            errors.append(error)
    return found, errors


def _verify(directory: Path, lock_wait_s: float, interrupts: Interrupts) -> dict[str, Any]:
    """Check one arena, with a bar on a terminal; return the result."""
    from kvray.store import Arena
    from kvray.store.scan import scan

    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        console=(console := printer(is_error=True)),
        transient=True,
        disable=not console.is_terminal,
        auto_refresh=False,  # its thread would take signals that are held back
    )
    task = progress.add_task(f"Checking {directory.name}", total=None)

    def report(done: int, total: int) -> None:
        interrupts.check()
        progress.update(task, completed=done, total=total, refresh=True)

    arena = Arena(directory, lock_wait_s=lock_wait_s)
    try:
        arena.join("verify")
        start = time.perf_counter()
        with progress:
            found = scan(arena, report)
        return {
            "cluster_name": arena.cluster_name,
            "directory": str(directory),
            "blocks": found.blocks,
            "bytes": found.num_bytes,
            "seconds": round(time.perf_counter() - start, 3),
            "corrupt": list(found.corrupt),
            "damage": dict(found.damage),
            "skipped": found.skipped,
        }
    finally:
        arena.close()


def _print(found: list[dict[str, Any]], parent: Path) -> None:
    console = printer(soft_wrap=True)
    if not found:
        console.print(f"This user has no arena under {parent!s}.")
        return
    console.print(arenas_table(found))
    for arena in found:
        if corrupt := arena["corrupt"]:
            names = ", ".join(corrupt[:_NAMES_MAX]) + (", ..." if corrupt[_NAMES_MAX:] else "")
            console.print(f"{arena['directory']}: corrupt, now quarantined: {names}")
        if damage := arena["damage"]:
            names = ", ".join(f"{count} {name}" for name, count in damage.items())
            console.print(
                f"{arena['directory']}: tables damaged: {names}. The shard that"
                " serves it mends them within minutes, else the next `kvray up` does; test the"
                " memory of this node."
            )


def arenas_table(found: list[dict[str, Any]]) -> Table:
    """Return one row for each arena that was checked."""
    numbers = ("blocks", "bytes", "seconds", "corrupt", "skipped")
    table = empty_table("arena", numbers=numbers, title="Arenas")
    for arena in found:
        table.add_row(
            arena["directory"],
            str(arena["blocks"]),
            format_size(arena["bytes"]),
            f"{arena['seconds']:.2f}",
            str(len(arena["corrupt"])),
            str(arena["skipped"]),
        )
    return table
