"""The screen of `kvray top`, from the latest statuses of a tier; pure."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvray.cli.text.hits import COMPUTED, SOURCES, source_shares, sources_sentence
from kvray.cli.text.memory import node_name
from kvray.cli.text.rates import History, NodeRates, ReplicaRates
from kvray.config import format_size
from kvray.console.output import empty_table

_BAR = 20
_REASONS_MAX = 3


def view(history: History, trouble: str = "") -> RenderableType:
    """Return one frame; `trouble` is why the tier does not answer, or empty."""
    latest = history.latest
    parts: list[RenderableType] = []
    if trouble:
        parts.append(Text(f"No answer: {trouble} Trying again.", style="red"))
    if latest is None:
        return Group(*parts) if parts else Text("Asking the tier.")
    if message := latest.get("lookup", {}).get("message"):
        parts.append(Text(f"The lookup does not answer: {message}", style="red"))
    replicas = history.replicas()
    parts.append(Text(headline(latest["cluster_name"], history, replicas)))
    parts.append(nodes_table(history.nodes()))
    if replicas:
        parts.append(replicas_table(replicas))
    else:
        parts.append(Text("No replica has registered yet."))
    return Group(*parts)


def headline(name: str, history: History, replicas: Sequence[ReplicaRates]) -> str:
    """Return the tier's name, and where its prompt tokens come from at present."""
    totals: Counter[str] = Counter()
    for one in replicas:
        totals.update(one.counters)
    prompt = totals["prompt_tokens"]
    rates = "no requests"
    if prompt:
        rates = f"{prompt:,.0f} prompt tokens/s: {sources_sentence(totals)}"
    return f"Tier {name}, last {history.seconds:.0f} s: {rates}"


def nodes_table(nodes: Sequence[NodeRates]) -> Table:
    """Return one row for each node."""
    has_disk = any("nvme" in one.shard for one in nodes)
    numbers = ("evicted/s", "staged/s", *(("to disk/s", "from disk/s") if has_disk else ()))
    table = empty_table("node", "state", "memory", "", numbers=numbers)
    for one in nodes:
        arena = one.shard.get("arena")
        cells: list[RenderableType] = [node_name(dict(one.shard)), str(one.shard["state"])]
        if arena is not None:
            used, whole = arena["resident_bytes"], arena["capacity_bytes"]
            cells.append(f"{format_size(used)}/{format_size(whole)}")
            cells.append(ProgressBar(total=whole, completed=used, width=_BAR))
            cells += [f"{one.evicted:,.0f}", rate_text(one.staged_bytes)]
            if has_disk:
                cells += [rate_text(one.written_bytes), rate_text(one.read_bytes)]
        table.add_row(*cells)
    return table


def replicas_table(replicas: Sequence[ReplicaRates]) -> Table:
    """Return one row for each rank."""
    numbers = ("prompt tok/s", *SOURCES, COMPUTED)
    table = empty_table("replica", "rank", numbers=numbers)
    table.add_column("missed because")
    for one in replicas:
        reasons = list(one.missed.items())[:_REASONS_MAX]
        because = ", ".join(f"{name.replace('_', ' ')} {rate:,.0f}" for name, rate in reasons)
        table.add_row(
            one.rank["replica"] + ("" if one.rank["connected"] else " gone"),
            str(one.rank["rank"]),
            f"{one.prompt:,.0f}",
            *source_shares(one.counters).values(),
            because,
        )
    return table


def rate_text(rate: float) -> str:
    """Return bytes a second as text."""
    return format_size(int(rate)) if rate >= 1 else "0"
