"""`kvray sweep` and `kvray verify`: this node's arenas, removed or checked, without Ray."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import TransferSpeedColumn
from rich.table import Table

from kvray.cli.asking import show_answer
from kvray.cli.explain import age_text
from kvray.config import format_size, load_config
from kvray.console.interrupts import Interrupts, masked
from kvray.console.options import ConfigOption, JsonOption, flag, option
from kvray.console.output import EXIT_FAILED, empty_table
from kvray.console.progress import COUNTING, make_progress
from kvray.errors import ConfigError, ShardUnavailable

if TYPE_CHECKING:
    from kvray.actors.owner.inventory import Finding

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
        option("DIR", "The directory to look in.", names=["--dir"], default="arena.dir"),
    ] = None,
    dry_run: Annotated[bool, flag("--dry-run", "Show the arenas, and remove none.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove this node's arenas that have neither a shard nor an engine.

    It looks at the arenas of this user only, and lists all of them.
    """
    parent = directory or load_config(config).arena.dir
    with masked():
        from kvray.actors.owner.inventory import find_arenas

    swept = [_swept(finding, dry_run=dry_run) for finding in find_arenas(parent)]
    found = {"directory": str(parent), "arenas": swept}
    show_answer(found, _report_swept, as_json=as_json)
    if any(arena["outcome"] == "left" for arena in swept):
        raise typer.Exit(EXIT_FAILED)


def _swept(finding: "Finding", *, dry_run: bool) -> dict[str, Any]:
    """Remove the arena if nobody uses it; return what it was, and the outcome."""
    from kvray.actors.owner.inventory import look_at, remove_unused

    outcome, problem = str(finding.use), None
    if outcome == "unused" and not dry_run:
        try:
            # If it stays, a process may have attached meanwhile.
            outcome = "removed" if remove_unused(finding.path) else str(look_at(finding.path).use)
            if outcome == "unused":
                outcome, problem = "left", "it has files of others."
        except ConfigError as error:
            outcome, problem = "left", str(error)
        except OSError as error:
            outcome, problem = "left", f"{error.filename} ({error.strerror}); remove it by hand."
    age_s = None if finding.created is None else round(time.time() - finding.created, 1)
    found = asdict(finding) | {"path": str(finding.path), "age_s": age_s}
    return found | {"outcome": outcome, "problem": problem}


def _report_swept(found: dict[str, Any]) -> Iterator[Table | str]:
    parent, swept = found["directory"], found["arenas"]
    if not swept:
        yield f"There are no arenas of this user in {parent}."
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
    yield table
    for arena in swept:
        if arena["defect"] is not None and arena["owner"] is None:
            yield f"{arena['path']}: {arena['defect']}"
        if arena["outcome"] == "left":
            yield f"{arena['path']} could not be removed: {arena['problem']}"


def verify(
    interrupts: Interrupts,
    config: ConfigOption = None,
    all_arenas: Annotated[
        bool, flag("--all", "Check every arena of this user under arena.dir.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check every stored block of this node, and the tables that find it.

    Engines go on meanwhile. A block with wrong bytes is quarantined and never served. The shard
    mends the tables. Needs no Ray.
    """
    settings = load_config(config)
    found: list[dict[str, Any]] = []
    errors: list[ShardUnavailable] = []
    directories = [settings.node_dir]
    if all_arenas:
        from kvray.actors.owner.ownership import is_own
        from kvray.store.arena.file import ARENA_FILE

        every = sorted(settings.arena.dir.glob("kvray-*"))
        directories = [one for one in every if is_own(one) and (one / ARENA_FILE).exists()]
    for directory in directories:
        try:
            # A signal waits for the end of a batch: no lease may stay behind.
            with interrupts.held():
                found.append(_verify(directory, settings.arena.lock_wait_s, interrupts))
        except ShardUnavailable as error:
            errors.append(error)
    if as_json or found or not errors:
        told = {"arenas": found, "errors": [str(error) for error in errors]}
        parent = str(settings.arena.dir)
        show_answer(told, lambda told: _report_verified(told, parent), as_json=as_json)
    if any(arena["corrupt"] or arena["damage"] for arena in found):
        raise typer.Exit(EXIT_FAILED)
    if errors:
        raise errors[0]


def _verify(directory: Path, lock_wait_s: float, interrupts: Interrupts) -> dict[str, Any]:
    from kvray.store import Arena
    from kvray.store.scan import scan

    progress = make_progress(*COUNTING[:3], TransferSpeedColumn(), auto_refresh=False)
    task = progress.add_task(f"Checking {directory.name}", total=None)

    def report(done: int, total: int) -> None:
        interrupts.check()
        progress.update(task, completed=done, total=total, refresh=True)

    with closing(Arena(directory, lock_wait_s=lock_wait_s)) as arena, progress:
        arena.join("verify")
        start = time.perf_counter()
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


def _report_verified(told: dict[str, Any], parent: str) -> Iterator[Table | str]:
    found = told["arenas"]
    if not found:
        yield f"This user has no arena under {parent}."
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
    yield table
    for arena in found:
        if corrupt := arena["corrupt"]:
            names = ", ".join(corrupt[:_NAMES_MAX]) + (", ..." if corrupt[_NAMES_MAX:] else "")
            yield f"{arena['directory']}: corrupt, now quarantined: {names}"
        if damage := arena["damage"]:
            names = ", ".join(f"{count} {name}" for name, count in damage.items())
            yield (
                f"{arena['directory']}: tables damaged: {names}. The shard that serves it mends"
                " them within minutes, else the next `kvray up` does; test the memory of this node."
            )
