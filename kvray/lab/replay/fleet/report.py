"""The output of a fleet's replay: a table, or one JSON object."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from kvray.console.output import empty_table
from kvray.lab.replay.fleet.comparison import ONE, FleetComparison
from kvray.lab.replay.fleet.results import FleetOutcome
from kvray.lab.replay.report import machine_figures, percent, print_trace, trace_figures

_NUMBERS = ("reuse", "pool", "host", "remote", "p50", "p90", "in time", "goodput", "spread")
_PLAN = (
    *("num_replicas", "pool_blocks", "host_blocks", "disk_blocks", "speed", "deadline_s"),
    *("imbalance_max", "seed"),
)


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
