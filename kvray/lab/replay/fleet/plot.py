"""What routers reuse and how long first tokens take, as a picture."""

from __future__ import annotations

from matplotlib.figure import Figure

from kvray.lab.replay.fleet.comparison import FleetComparison

_SOURCES = ("pool", "host", "disk", "remote")
_BOUND = "#8a8f98"


def make_figure(found: FleetComparison) -> Figure:
    """Return reuse by source and the first token's percentiles, for each router; both from 0."""
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
