"""`kvray sweep`: lists a node's arenas and removes those that nobody uses. Needs no Ray."""

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvray.cli.asking import show_answer
from kvray.cli.text.explanation import age_text
from kvray.config import format_size, load_config
from kvray.console.options import ConfigOption, JsonOption, VerboseOption
from kvray.console.output import boundary, empty_table, printer
from kvray.errors import ConfigError

if TYPE_CHECKING:
    from kvray.actors.owner.inventory import Finding

_EXIT_LEFT = 1
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
    with boundary(verbose=verbose) as interrupts:
        parent = directory or load_config(config).arena.dir
        with interrupts.masked():
            from kvray.actors.owner.inventory import find_arenas

        swept = [_swept(finding, dry_run=dry_run) for finding in find_arenas(parent)]
        found = {"directory": str(parent), "arenas": swept}
        show_answer(found, lambda told: _print(parent, told["arenas"]), as_json=as_json)
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


def _print(parent: Path, swept: list[dict[str, Any]]) -> None:
    console = printer()
    if not swept:
        console.print(f"There are no arenas of this user in {parent!s}.")
        return
    columns = ("directory", "cluster", "memory", "age", "owner", "attached", "")
    table = empty_table(*columns, title=f"Arenas in {parent}", folds=True)
    for arena in swept:
        table.add_row(*_cells(arena))
    console.print(table)
    for line in _problems(swept):
        console.print(line, soft_wrap=True)


def _cells(arena: dict[str, Any]) -> list[str]:
    owner, holders = arena["owner"], arena["holders"]
    owned_by = "none" if owner is None else f"{owner['shard'] or 'process'} ({owner['pid']})"
    attached = [f"{holder['label'] or 'process'} ({holder['pid']})" for holder in holders]
    return [
        Path(arena["path"]).name,
        arena["cluster_name"],
        format_size(arena["num_bytes"]),
        "" if arena["age_s"] is None else age_text(arena["age_s"]),
        owned_by,
        "\n".join(attached) or "none",
        _OUTCOMES[arena["outcome"]],
    ]


def _problems(swept: list[dict[str, Any]]) -> Iterator[str]:
    for arena in swept:
        if arena["defect"] is not None and arena["owner"] is None:
            yield f"{arena['path']}: {arena['defect']}"
        if arena["outcome"] == "left":
            yield f"{arena['path']} could not be removed: {arena['problem']}"
