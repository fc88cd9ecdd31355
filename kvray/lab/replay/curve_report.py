"""The output of a check of the curve: a table for each policy, or one JSON object."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from kvray.console.output import empty_table
from kvray.lab.replay.curve_check import PROMPTS_PER_S, CurveCheck
from kvray.lab.replay.report import percent
from kvray.store.sizing import CPU_SHARE


def print_all(console: Console, checks: Sequence[CurveCheck]) -> None:
    """Print each curve beside the full replays, and what it cost."""
    for check in checks:
        disk = f" + {check.admission}, {check.nvme_blocks:,} blocks of NVMe below"
        title = f"{check.policy}{disk if check.nvme_blocks else ''}"
        numbers = ("blocks", "full replay", "curve", "standard error", "off by")
        table = empty_table(numbers=numbers, title=title)
        for one in check.points:
            shares = map(percent, (one.full, one.live, one.error, one.live - one.full))
            table.add_row(f"{one.host_blocks:,}", *shares)
        console.print(table)
        console.print(
            f"Mean error {100 * check.mean_error:.2f} points, of {check.sampled_blocks:,} blocks in"
            f" {check.sampled_prompts:,} prompts: one key in {1 / check.rate:,.0f}."
        )
        console.print(
            f"At {PROMPTS_PER_S:,} prompts a second each costs {check.note_us:.1f} us of its"
            f" engine's thread and {check.look_us:.1f} us of its link, and all together"
            f" {100 * check.add_share:.2f} % of a core of the shard. The sample's replays take"
            f" {check.replay_s:.1f} s of CPU time, for which a shard gives"
            f" {percent(CPU_SHARE)} of a core, and sample and replay"
            f" {check.memory_bytes / 2**20:.1f} MiB at most."
        )


def to_json(checks: Sequence[CurveCheck]) -> str:
    """Return everything as one JSON object."""
    found = [{**asdict(one), "mean_error": one.mean_error} for one in checks]
    return json.dumps({"checks": found}, indent=2)
