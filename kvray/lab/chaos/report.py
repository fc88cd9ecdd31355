"""The output of `kvray chaos`: a table of the kinds of faults, and a verdict."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvray.lab.chaos.judge import has_passed
from kvray.lab.chaos.schedule import KINDS


def print_all(console: Console, found: dict[str, Any]) -> None:
    """Print the table, the figures and the verdict."""
    console.print(kinds_table(found))
    console.print(
        f"{found['requests']} requests, {found['faults_injected']} faults; hits are"
        f" {found['hit_tokens_ratio']:.0%} of those without faults."
    )
    console.print(
        f"Scheduler stalls, 99th percentile: {found['stall_ms_p99']:.1f} ms; with an empty"
        f" connector {found['control_stall_ms_p99']:.1f} ms."
    )
    for kind, reason in found["skipped_kinds"].items():
        console.print(f"{kind} was left out: {reason}.")
    for failure in found["failures"]:
        console.print(f"✘ {failure}", soft_wrap=True)
    result = "passed" if has_passed(found) else "failed"
    console.print(
        f"Verdict: {result}, {found['wrong_tokens']} wrong tokens; beyond the injected faults"
        f" {found['engine_deaths']} engine deaths, {found['hung_requests']} hung requests and"
        f" {found['unsettled_nodes']} nodes that are not back to normal."
    )


def kinds_table(found: dict[str, Any]) -> Table:
    """Return one row for each kind of fault that was due."""
    table = Table(box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    table.add_column("fault", no_wrap=True)
    for name in ("struck", "in flight\nat least", "hits back\nwithin"):
        table.add_column(name, justify="right")
    table.add_column("did not strike")
    for kind in KINDS:
        if (row := found["by_kind"].get(kind.name)) is not None:
            least, back = row["in_flight_min"], row["recovery_s_max"]
            table.add_row(
                kind.text,
                str(row["struck"]),
                "" if least is None else str(least),
                "" if back is None else f"{back:.1f} s",
                ", ".join(f"{count}: {reason}" for reason, count in row["skipped"].items()),
            )
    return table
