"""The output of a fleet's replay: a table, one JSON object, or a picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from kvray.console.output import empty_table
from kvray.lab.replay.fleet.simulator import ONE, FleetComparison, FleetOutcome
from kvray.lab.replay.report import machine_figures, percent, print_trace, trace_figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUMBERS = ("reuse", "pool", "host", "remote", "p50", "p90", "in time", "goodput", "spread")
_PLAN = (
    *("num_replicas", "pool_blocks", "host_blocks", "disk_blocks", "speed", "deadline_s"),
    *("imbalance_max", "seed"),
)
_SOURCES = ("pool", "host", "disk", "remote")
_BOUND = "#8a8f98"


def make_table(found: FleetComparison) -> Table:
    """Return one row for each router, and the bound below."""
    has_disk = found.plan.disk_blocks > 0
    numbers = [*_NUMBERS[:3], *(["disk"] if has_disk else []), *_NUMBERS[3:], "of one"]
    table = empty_table("router", numbers=numbers)
    for outcome in found.outcomes:
        table.add_row(*_cells(outcome, has_disk=has_disk))
    table.add_row(*_cells(found.one, has_disk=has_disk), style="dim")
    return table


def print_fleet(console: Console, found: FleetComparison) -> None:
    """Print the trace, the fleet, the table, and what its columns are."""
    plan, rates = found.plan, found.plan.rates
    print_trace(console, found.trace)
    disk = f" and {plan.disk_blocks:,} on disk" if plan.disk_blocks else ""
    console.print(
        f"{plan.num_replicas} replicas at {plan.speed:g} times the trace's speed: each has a pool"
        f" of {plan.pool_blocks:,} blocks, {plan.host_blocks:,} in its node's memory{disk}, and"
        f" computes {rates.prefill_tokens_per_s:,.0f} tokens/s."
    )
    console.print(make_table(found))
    console.print(
        "Reuse: tokens that were not computed, and where they were. p50, p90: seconds to the first"
        f" token. In time: within {plan.deadline_s:g} s; goodput: such requests a second. Spread:"
        f" most work of a replica over the mean. Of one: reuse over that of {ONE}, which has"
        " all the memory and all the rates."
    )


def to_json(found: FleetComparison, *, concurrent: int) -> str:
    """Return everything as one JSON object; `concurrent` is the command's option."""
    plan, rates = found.plan, found.plan.rates
    return json.dumps(
        {
            **trace_figures(found.trace),
            "concurrent": concurrent,
            **{name: getattr(plan, name) for name in _PLAN},
            "prefill_tokens_per_s": rates.prefill_tokens_per_s,
            "token_bytes": rates.token_bytes,
            "host_bytes_per_s": rates.host.bytes_per_s,
            "link_bytes_per_s": rates.remote.bytes_per_s,
            "link_latency_s": rates.remote.latency_s,
            "disk_bytes_per_s": rates.disk.bytes_per_s if rates.disk else None,
            "one_replica": asdict(found.one),
            "routers": [asdict(outcome) for outcome in found.outcomes],
            **machine_figures(),
        },
        indent=2,
    )


def _cells(outcome: FleetOutcome, *, has_disk: bool) -> list[str]:
    of_one = outcome.reuse_of_one
    return [
        outcome.router,
        percent(outcome.reuse),
        percent(outcome.pool_reuse),
        percent(outcome.host_reuse),
        *([percent(outcome.disk_reuse)] if has_disk else []),
        percent(outcome.remote_reuse),
        f"{outcome.first_token_p50_s:.2f}",
        f"{outcome.first_token_p90_s:.2f}",
        percent(outcome.in_time),
        f"{outcome.goodput_per_s:.2f}",
        f"{outcome.load_spread:.2f}",
        "" if of_one is None else percent(of_one),
    ]


def make_figure(found: FleetComparison) -> Figure:
    """Return reuse by source and the first token's percentiles, for each router; both from 0."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [outcome.router for outcome in found.outcomes]
    bottom = [0.0] * len(names)
    for source in _SOURCES:
        parts = [100 * getattr(outcome, f"{source}_reuse") for outcome in found.outcomes]
        if any(parts):
            left.bar(names, parts, bottom=bottom, label=source)
            bottom = [below + part for below, part in zip(bottom, parts, strict=True)]
    left.axhline(100 * found.one.reuse, color=_BOUND, linestyle="--", label=found.one.router)
    left.set_ylabel("tokens not computed, %")
    places = range(len(names))
    for shift, name in ((-0.2, "p50"), (0.2, "p90")):
        heights = [getattr(outcome, f"first_token_{name}_s") for outcome in found.outcomes]
        right.bar([place + shift for place in places], heights, width=0.4, label=name)
    right.set_xticks(list(places), names)
    right.set_ylabel("first token, s")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=5)
    plan = found.plan
    figure.suptitle(f"{found.trace.name}, {plan.num_replicas} replicas, speed {plan.speed:g}")
    return figure
