"""The reports of replays: of policies, of routers, and of a shard's curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from kvray.console.output import blank_figure, empty_table
from kvray.lab.replay.routers import ONE, FleetComparison, FleetOutcome
from kvray.lab.replay.simulator import BASELINE, Comparison, CurveCheck, Outcome
from kvray.lab.report import Report, machine_facts, percent
from kvray.store.replay import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HITS = ("hit_ratio", "token_hit_ratio", "hit_blocks", "hit_tokens")
_RUN = (
    *("policy", "admission", "host_blocks", "nvme_blocks", *_HITS, "host_hit_blocks"),
    *("nvme_hit_blocks", "nvme_written_blocks", "written_per_hit", "seconds", "refs_per_s"),
    *("gain", "write_share"),
)
_SOURCES = ("pool", "host", "disk", "remote")
_BOUND = "#8a8f98"


def report_policies(found: Comparison, *, concurrent: int, seed: int) -> Report:
    """Return the report of policies; `concurrent` and `seed` are the command's options."""
    parts: list[str | Table] = [
        _trace_text(found.trace),
        _policy_table(found),
        "Hits are blocks of contiguous prefixes. Gain: 0 is LRU, 1 is Belady's optimum, which"
        " knows the future.",
    ]
    if found.plan.nvme_blocks:
        parts.append(
            f"Below the host tier are {found.plan.nvme_blocks:,} blocks of NVMe; Belady has one"
            " tier as large as both. Written: blocks. Per hit: bytes written for each byte found"
            " there. Of LRU's: relative to LRU with a disk that takes every block."
        )
    titles = {(one.policy, one.admission): one.title for one in found.outcomes}
    gains = found.mean_gains()
    parts += [
        f"Mean gain of {titles[name]} over all sizes: {gain:+.3f}"
        for name, gain in gains.items()
        if gain is not None and titles[name] != BASELINE
    ]
    facts = {
        **_trace_facts(found.trace),
        "concurrent": concurrent,
        "seed": seed,
        "nvme_blocks": found.plan.nvme_blocks,
        "infinite": _pick(found.infinite, _HITS),
        "belady": [
            {"host_blocks": size, "blocks": bound.host_blocks, **_pick(bound, _HITS)}
            for size, bound in found.belady.items()
        ],
        "results": [_pick(one, _RUN) for one in found.outcomes],
        "mean_gains": [
            {"policy": policy, "admission": admission, "mean_gain": gain}
            for (policy, admission), gain in gains.items()
        ],
        **machine_facts(),
    }
    return Report(parts=parts, facts=facts, figure=lambda: _draw_policies(found))


def report_routers(found: FleetComparison, *, concurrent: int) -> Report:
    """Return the report of routers; `concurrent` is the command's option."""
    plan, rates = found.plan, found.plan.rates
    has_disk = plan.disk_blocks > 0
    sources = [source for source in _SOURCES if source != "disk" or has_disk]
    numbers = ("p50", "p90", "in time", "goodput", "spread", "of one")
    table = empty_table("router", numbers=["reuse", *sources, *numbers])
    for outcome in found.outcomes:
        table.add_row(*_router_cells(outcome, sources))
    table.add_row(*_router_cells(found.one, sources), style="dim")
    disk = f" and {plan.disk_blocks:,} on disk" if has_disk else ""
    parts: list[str | Table] = [
        _trace_text(found.trace),
        f"{plan.num_replicas} replicas at {plan.speed:g} times the trace's speed: each has a pool"
        f" of {plan.pool_blocks:,} blocks, {plan.host_blocks:,} in its node's memory{disk}, and"
        f" computes {rates.prefill_tokens_per_s:,.0f} tokens/s.",
        table,
        "Reuse: tokens that were not computed, and where they were. p50, p90: seconds to the first"
        f" token. In time: within {plan.deadline_s:g} s; goodput: such requests a second. Spread:"
        f" most work of a replica over the mean. Of one: reuse over that of {ONE}, which has"
        " all the memory and all the rates.",
    ]
    facts = {
        **_trace_facts(found.trace),
        "concurrent": concurrent,
        **{name: value for name, value in asdict(plan).items() if name != "rates"},
        "prefill_tokens_per_s": rates.prefill_tokens_per_s,
        "token_bytes": rates.token_bytes,
        "host_bytes_per_s": rates.host.bytes_per_s,
        "link_bytes_per_s": rates.remote.bytes_per_s,
        "link_latency_s": rates.remote.latency_s,
        "disk_bytes_per_s": rates.disk.bytes_per_s if rates.disk else None,
        "one_replica": asdict(found.one),
        "routers": [asdict(outcome) for outcome in found.outcomes],
        **machine_facts(),
    }
    return Report(parts=parts, facts=facts, figure=lambda: _draw_routers(found))


def report_curves(checks: Sequence[CurveCheck]) -> Report:
    """Return the report of each curve beside the full replays, and what it cost."""
    parts: list[str | Table] = []
    for check in checks:
        disk = f" + {check.admission}, {check.nvme_blocks:,} blocks of NVMe below"
        title = f"{check.policy}{disk if check.nvme_blocks else ''}"
        numbers = ("blocks", "full replay", "curve", "standard error", "off by")
        table = empty_table(numbers=numbers, title=title)
        for one in check.points:
            shares = map(percent, (one.full, one.live, one.error, one.live - one.full))
            table.add_row(f"{one.host_blocks:,}", *shares)
        parts += [
            table,
            f"Mean error {100 * check.mean_error:.2f} points, of {check.sampled_blocks:,} blocks in"
            f" {check.sampled_prompts:,} prompts: one key in {1 / check.rate:,.0f}.",
        ]
    facts = {"checks": [{**asdict(one), "mean_error": one.mean_error} for one in checks]}
    return Report(parts=parts, facts=facts)


def _trace_text(trace: Trace) -> str:
    once = int((np.bincount(trace.ids) == 1).sum())
    return (
        f"{trace.name}: {trace.num_requests:,} requests in"
        f" {timedelta(seconds=round(trace.seconds))} with {trace.prompt_tokens:,} tokens ask for"
        f" {trace.num_refs:,} blocks of {trace.block_tokens} tokens; {trace.num_unique:,} of them"
        f" differ, and {percent(once / trace.num_unique)} of these are asked for once."
    )


def _trace_facts(trace: Trace) -> dict[str, Any]:
    return {
        "trace": trace.name,
        "block_tokens": trace.block_tokens,
        "requests": trace.num_requests,
        "refs": trace.num_refs,
        "unique_blocks": trace.num_unique,
        "prompt_tokens": trace.prompt_tokens,
        "trace_seconds": trace.seconds,
    }


def _pick(record: object, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def _policy_table(found: Comparison) -> Table:
    """Return one row for each run, and the bounds below those of each size."""
    has_disk = found.plan.nvme_blocks > 0
    disk = ("host", "NVMe", "written", "per hit", "of LRU's") if has_disk else ()
    numbers = ("blocks", "policy", "hit ratio", "of tokens", "gain", *disk, "refs/s")
    table = empty_table(numbers=numbers)
    table.columns[1].justify = "left"
    for host_blocks in found.plan.host_blocks:
        size = f"{host_blocks:,}"
        for outcome in found.outcomes:
            if outcome.host_blocks == host_blocks:
                table.add_row(size, *_policy_cells(outcome, has_disk=has_disk))
                size = ""
        table.add_row("", "Belady", *_hit_cells(found.belady[host_blocks]), style="dim")
        table.add_section()
    table.add_row("∞", "infinite", *_hit_cells(found.infinite), style="dim")
    return table


def _policy_cells(outcome: Outcome, *, has_disk: bool) -> list[str]:
    gain, per_hit, share = outcome.gain, outcome.written_per_hit, outcome.write_share
    cells = [outcome.title, *_hit_cells(outcome), "" if gain is None else f"{gain:+.2f}"]
    if has_disk:
        cells += [
            percent(outcome.host_hit_blocks / max(1, outcome.refs)),
            percent(outcome.nvme_hit_blocks / max(1, outcome.refs)),
            f"{outcome.nvme_written_blocks:,}",
            "" if per_hit is None else f"{per_hit:.2f}",
            "" if share is None else percent(share),
        ]
    return [*cells, f"{outcome.refs_per_s:,.0f}"]


def _hit_cells(outcome: Outcome) -> list[str]:
    return [percent(outcome.hit_ratio), percent(outcome.token_hit_ratio)]


def _router_cells(outcome: FleetOutcome, sources: Sequence[str]) -> list[str]:
    of_one = outcome.reuse_of_one
    return [
        outcome.router,
        percent(outcome.reuse),
        *(percent(getattr(outcome, f"{source}_reuse")) for source in sources),
        f"{outcome.first_token_p50_s:.2f}",
        f"{outcome.first_token_p90_s:.2f}",
        percent(outcome.in_time),
        f"{outcome.goodput_per_s:.2f}",
        f"{outcome.load_spread:.2f}",
        "" if of_one is None else percent(of_one),
    ]


def _draw_policies(found: Comparison) -> Figure:
    """Draw the share of blocks that each policy missed, from 0, by the size of the host tier."""
    figure, (axes,) = blank_figure(9, 5.5)
    sizes = list(found.plan.host_blocks)
    lines: dict[str, list[float]] = {}
    for outcome in found.outcomes:
        lines.setdefault(outcome.title, []).append(100 * (1 - outcome.hit_ratio))
    for name, misses in lines.items():
        axes.plot(sizes, misses, marker="o", markersize=4, label=name)
    best = [100 * (1 - found.belady[size].hit_ratio) for size in sizes]
    axes.plot(sizes, best, color=_BOUND, linestyle="--", marker="o", markersize=4, label="Belady")
    least = 100 * (1 - found.infinite.hit_ratio)
    axes.axhline(least, color=_BOUND, linestyle=":", label="infinite cache")
    disk = f", {found.plan.nvme_blocks:,} blocks of NVMe below" if found.plan.nvme_blocks else ""
    axes.set_title(f"{found.trace.name}{disk}", loc="left")
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel(f"host tier, blocks of {found.trace.block_tokens} tokens")
    axes.set_ylabel("blocks missed, %")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    return figure


def _draw_routers(found: FleetComparison) -> Figure:
    """Draw reuse by source and the first token's percentiles, for each router; both from 0."""
    figure, (left, right) = blank_figure(10, 4.5, columns=2)
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
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=5)
    plan = found.plan
    figure.suptitle(f"{found.trace.name}, {plan.num_replicas} replicas, speed {plan.speed:g}")
    return figure
