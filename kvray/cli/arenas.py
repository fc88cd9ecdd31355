"""`kvray sweep` and `kvray verify`: this node's arenas, removed if nobody uses them, or checked.

Neither needs Ray.
"""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from kvray.cli.asking import show_answer
from kvray.cli.explain import age_text
from kvray.config import KVRayConfig, format_size, load_config
from kvray.console.interrupts import Interrupts, masked
from kvray.console.options import ConfigOption, JsonOption, VerboseOption
from kvray.console.output import boundary, empty_table, printer
from kvray.errors import ConfigError, ShardUnavailable

if TYPE_CHECKING:
    from kvray.actors.owner.inventory import Finding

_EXIT_LEFT, _EXIT_CORRUPT = 1, 1
_NAMES_MAX = 20
_OUTCOMES = {
    "owned": "kept: its shard runs",
    "attached": "kept: a shard may come back",
    "unused": "would be removed",
    "removed": "removed",
    "left": "could not be removed",
}


def sweep(
    config: ConfigOption = None,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", metavar="DIR", help="The directory to look in; by default arena.dir."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the arenas, and remove none.")
    ] = False,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Remove this node's arenas that have neither a shard nor an engine.

    It looks at the arenas of this user only, and lists all of them.
    """
    with boundary(verbose=verbose):
        parent = directory or load_config(config).arena.dir
        with masked():
            from kvray.actors.owner.inventory import find_arenas

        swept = [_swept(finding, dry_run=dry_run) for finding in find_arenas(parent)]
        found = {"directory": str(parent), "arenas": swept}
        show_answer(found, lambda told: _print_swept(parent, told["arenas"]), as_json=as_json)
    if any(arena["outcome"] == "left" for arena in swept):
        raise typer.Exit(_EXIT_LEFT)


def _swept(finding: "Finding", *, dry_run: bool) -> dict[str, Any]:
    """Remove the arena if nobody uses it; return what it was, and the outcome."""
    outcome, problem = str(finding.use), None
    if outcome == "unused" and not dry_run:
        outcome, problem = _remove(finding.path)
    age_s = None if finding.created is None else round(time.time() - finding.created, 1)
    found = asdict(finding) | {"path": str(finding.path), "age_s": age_s}
    return found | {"outcome": outcome, "problem": problem}


def _remove(directory: Path) -> tuple[str, str | None]:
    """Remove an arena that nobody used; return the outcome, and why it is left if it is."""
    from kvray.actors.owner.inventory import look_at, remove_unused

    try:
        if remove_unused(directory):
            return "removed", None
    except ConfigError as error:
        return "left", str(error)
    except OSError as error:
        return "left", f"{error.filename} ({error.strerror}); remove it by hand."
    use = look_at(directory).use  # a process may have attached meanwhile
    return ("left", "it has files of others.") if use == "unused" else (use, None)


def _print_swept(parent: Path, swept: list[dict[str, Any]]) -> None:
    console = printer()
    if not swept:
        console.print(f"There are no arenas of this user in {parent!s}.")
        return
    columns = ("directory", "cluster", "memory", "age", "owner", "attached", "")
    table = empty_table(*columns, title=f"Arenas in {parent}", folds=True)
    for arena in swept:
        owner, holders = arena["owner"], arena["holders"]
        attached = [f"{holder['label'] or 'process'} ({holder['pid']})" for holder in holders]
        table.add_row(
            Path(arena["path"]).name,
            arena["cluster_name"],
            format_size(arena["num_bytes"]),
            "" if arena["age_s"] is None else age_text(arena["age_s"]),
            "none" if owner is None else f"{owner['shard'] or 'process'} ({owner['pid']})",
            "\n".join(attached) or "none",
            _OUTCOMES[arena["outcome"]],
        )
    console.print(table)
    for arena in swept:
        path = arena["path"]
        if arena["defect"] is not None and arena["owner"] is None:
            console.print(f"{path}: {arena['defect']}", soft_wrap=True)
        if arena["outcome"] == "left":
            console.print(f"{path} could not be removed: {arena['problem']}", soft_wrap=True)


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
        found: list[dict[str, Any]] = []
        errors: list[ShardUnavailable] = []
        for directory in _directories(settings, all_arenas=all_arenas):
            try:
                # A signal waits for the end of a batch: no lease may stay behind.
                with interrupts.held():
                    found.append(_verify(directory, settings.arena.lock_wait_s, interrupts))
            except ShardUnavailable as error:
                errors.append(error)
        if as_json:
            print(json.dumps({"arenas": found, "errors": [str(error) for error in errors]}))
        elif found or not errors:
            _print_verified(found, settings.arena.dir)
        if any(arena["corrupt"] or arena["damage"] for arena in found):
            raise typer.Exit(_EXIT_CORRUPT)
        if errors:
            raise errors[0]


def _directories(settings: KVRayConfig, *, all_arenas: bool) -> list[Path]:
    if not all_arenas:
        return [settings.node_dir]
    from kvray.actors.owner.ownership import is_own
    from kvray.store.arena.file import ARENA_FILE

    found = sorted(settings.arena.dir.glob("kvray-*"))
    return [path for path in found if is_own(path) and (path / ARENA_FILE).exists()]


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


def _print_verified(found: list[dict[str, Any]], parent: Path) -> None:
    console = printer(soft_wrap=True)
    if not found:
        console.print(f"This user has no arena under {parent!s}.")
        return
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
    console.print(table)
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
