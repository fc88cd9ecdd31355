"""A run of `kvray replay`: the trace is read, then replayed, and a bar moves meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from kvray.errors import ConfigError
from kvray.replay import Comparison, Plan, Simulator, compare, read_trace


def load_simulator() -> Simulator:
    """Return the simulator of the tier's own parts."""
    module: Any = import_module("kvray.replay.simulator")
    return Simulator(
        simulate=module.simulate,
        policies=module.POLICIES,
        admissions=module.ADMISSIONS,
        everything=module.ADMISSIONS[0],
    )


def make_plan(
    simulator: Simulator,
    *,
    host_blocks: Sequence[int],
    nvme_blocks: int,
    policies: Sequence[str],
    admissions: Sequence[str],
) -> Plan:
    """Return what is to be replayed; no name stands for all names.

    Raises:
        ConfigError: there is no policy or admission of a name.
    """
    _check_names(policies, simulator.policies, "--policy")
    _check_names(admissions, simulator.admissions, "--admission")
    return Plan(
        policies=policies or simulator.policies,
        host_blocks=host_blocks,
        nvme_blocks=nvme_blocks,
        admissions=(admissions or simulator.admissions) if nvme_blocks else (None,),
    )


def run(
    path: Path,
    plan: Plan,
    simulator: Simulator,
    *,
    reading: dict[str, Any],
    console: Console,
) -> Comparison:
    """Read a trace and replay it.

    Args:
        path: of the trace.
        plan: what is to be replayed.
        simulator: what replays it.
        reading: how `read_trace` is to read it.
        console: where progress is shown, if it is a terminal.

    Raises:
        ConfigError: the trace cannot be used.
    """
    with _progress(console) as progress:
        bar = progress.add_task(f"Reading {path.name}", total=None)
        trace = read_trace(
            path,
            **reading,
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )
        progress.reset(bar, description="Replaying")
        return compare(
            trace,
            plan,
            simulator,
            progress=lambda title, done, total: progress.update(
                bar, description=title, completed=done, total=total
            ),
        )


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _check_names(names: Sequence[str], known: Sequence[str], option: str) -> None:
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"{option}: there is no {name!r}; {meant}known: {', '.join(known)}.")
