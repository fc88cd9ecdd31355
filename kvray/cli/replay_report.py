"""What a replay shows: tables, or one JSON object."""

from __future__ import annotations

import json
import platform
from datetime import timedelta
from typing import Any

import numpy as np
import psutil
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvray import __version__
from kvray.replay import Bound, Comparison, Outcome
from kvray.replay.comparison import BASELINE

_ALWAYS = ("blocks", "policy", "hit ratio", "of tokens", "gain")
_DISK = ("host", "NVMe", "written", "per hit", "of LRU's")


def make_table(found: Comparison) -> Table:
    """Return one row for each run, and what no policy beats below those of each size."""
    has_disk = found.plan.nvme_blocks > 0
    table = Table(box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    for name in _ALWAYS + (_DISK if has_disk else ()) + ("refs/s",):
        is_text = name == "policy"
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    for host_blocks in found.plan.host_blocks:
        size = f"{host_blocks:,}"
        for outcome in found.outcomes:
            if outcome.host_blocks == host_blocks:
                table.add_row(size, *_cells(found, outcome))
                size = ""
        table.add_row("", "[dim]Belady[/]", *_bound_cells(found.belady[host_blocks]))
        table.add_section()
    table.add_row("∞", "[dim]no end[/]", *_bound_cells(found.infinite))
    return table


def print_all(console: Console, found: Comparison) -> None:
    """Print the table, what it is a table of, and the mean gains."""
    trace = found.trace
    once = int((np.bincount(trace.ids) == 1).sum())
    console.print(
        f"[bold]{escape(trace.name)}[/]: {trace.num_requests:,} requests in"
        f" {timedelta(seconds=round(trace.seconds))} with {trace.prompt_tokens:,} tokens ask for"
        f" {trace.num_refs:,} blocks of {trace.block_tokens} tokens; {trace.num_unique:,} of them"
        f" differ, and {_percent(once / trace.num_unique)} of these are asked for once."
    )
    console.print(make_table(found))
    console.print(
        "Hits are blocks of contiguous prefixes. Gain: 0 is LRU, 1 is Belady's optimum, which"
        " knows the future."
    )
    if found.plan.nvme_blocks:
        console.print(
            f"Below the host tier are {found.plan.nvme_blocks:,} blocks of NVMe, and Belady has"
            " one tier as large as both. Written: blocks; per hit: bytes written for each byte"
            " found there; of LRU's: beside LRU with a disk that takes every block."
        )
    for (policy, admission), gain in _mean_gains(found).items():
        if gain is not None and _title(policy, admission) != BASELINE:
            name = _title(policy, admission)
            console.print(f"Mean gain of {name} over all sizes: {gain:+.3f}", markup=False)


def to_json(found: Comparison, *, concurrent: int, seed: int) -> str:
    """Return everything as one JSON object.

    Args:
        found: what all runs found.
        concurrent: how many sessions were laid out at a time, if the trace has sessions.
        seed: of their order.
    """
    trace = found.trace
    return json.dumps(
        {
            "trace": trace.name,
            "block_tokens": trace.block_tokens,
            "requests": trace.num_requests,
            "refs": trace.num_refs,
            "unique_blocks": trace.num_unique,
            "prompt_tokens": trace.prompt_tokens,
            "trace_seconds": trace.seconds,
            "concurrent": concurrent,
            "seed": seed,
            "nvme_blocks": found.plan.nvme_blocks,
            "infinite": _bound_figures(found.infinite),
            "belady": [
                {"host_blocks": host_blocks, "blocks": bound.num_blocks, **_bound_figures(bound)}
                for host_blocks, bound in found.belady.items()
            ],
            "results": [_figures(found, outcome) for outcome in found.outcomes],
            "mean_gains": [
                {"policy": policy, "admission": admission, "mean_gain": gain}
                for (policy, admission), gain in _mean_gains(found).items()
            ],
            "cpu_cores": psutil.cpu_count(),
            "machine": platform.machine(),
            "version": __version__,
        },
        indent=2,
    )


def title(outcome: Outcome) -> str:
    """Return the name of a policy, and of its admission where there is a disk."""
    return _title(outcome.policy, outcome.admission)


def _title(policy: str, admission: str | None) -> str:
    return policy if admission is None else f"{policy} + {admission}"


def _cells(found: Comparison, outcome: Outcome) -> list[str]:
    gain = found.gain(outcome)
    cells = [
        escape(title(outcome)),
        _percent(outcome.hit_ratio),
        _percent(outcome.token_hit_ratio),
        "" if gain is None else f"{gain:+.2f}",
    ]
    if found.plan.nvme_blocks:
        per_hit, share = outcome.written_per_hit, found.write_share(outcome)
        cells += [
            _percent(outcome.host_hit_blocks / max(1, outcome.refs)),
            _percent(outcome.nvme_hit_blocks / max(1, outcome.refs)),
            f"{outcome.nvme_written_blocks:,}",
            "" if per_hit is None else f"{per_hit:.2f}",
            "" if share is None else _percent(share),
        ]
    return [*cells, f"{outcome.refs_per_s:,.0f}"]


def _bound_cells(bound: Bound) -> list[str]:
    return [f"[dim]{_percent(ratio)}[/]" for ratio in (bound.hit_ratio, bound.token_hit_ratio)]


def _figures(found: Comparison, outcome: Outcome) -> dict[str, Any]:
    return {
        "policy": outcome.policy,
        "admission": outcome.admission,
        "host_blocks": outcome.host_blocks,
        "nvme_blocks": outcome.nvme_blocks,
        "hit_ratio": outcome.hit_ratio,
        "token_hit_ratio": outcome.token_hit_ratio,
        "gain": found.gain(outcome),
        "hit_blocks": outcome.hit_blocks,
        "hit_tokens": outcome.hit_tokens,
        "host_hit_blocks": outcome.host_hit_blocks,
        "nvme_hit_blocks": outcome.nvme_hit_blocks,
        "nvme_written_blocks": outcome.nvme_written_blocks,
        "written_per_hit": outcome.written_per_hit,
        "write_share": found.write_share(outcome),
        "seconds": outcome.seconds,
        "refs_per_s": outcome.refs_per_s,
    }


def _bound_figures(bound: Bound) -> dict[str, Any]:
    return {
        "hit_ratio": bound.hit_ratio,
        "token_hit_ratio": bound.token_hit_ratio,
        "hit_blocks": bound.hit_blocks,
        "hit_tokens": bound.hit_tokens,
    }


def _mean_gains(found: Comparison) -> dict[tuple[str, str | None], float | None]:
    names = dict.fromkeys((outcome.policy, outcome.admission) for outcome in found.outcomes)
    return {name: found.mean_gain(*name) for name in names}


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"
