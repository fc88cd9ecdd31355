"""The transport between each two nodes, and its reason; for `kvray status` and `doctor`."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from kvray.actors.names import MOVER_PREFIX, node_of
from kvray.console.output import empty_table

_SLOW = 8.0
"""Of a slow node even the fastest link has less than this part of what others have."""


class NodeLink(NamedTuple):
    """How blocks get from one node to another."""

    source: str
    target: str
    transport: str | None  # None: they cannot
    why: str
    bytes_per_s: float | None = None
    """As measured lately; None: nothing large has come over it yet."""
    latency_s: float | None = None
    """Of fetches that were not large."""
    breaker: str = "closed"
    error: str = ""


def node_links(found: dict[str, Any]) -> list[NodeLink]:
    """Return the link between each two nodes; `found` is what `Client.status` returned."""
    movers = {node_of(mover["mover"]): mover for mover in found.get("movers", [])}
    peers = {
        (node_of(peer["peer"]), node_of(shard["shard"])): peer
        for shard in found["shards"]
        for peer in shard.get("staging", {}).get("peers", [])
        if peer["peer"].startswith(MOVER_PREFIX)  # a shard that was asked for its disk is none
    }
    made = []
    for target, receiver in movers.items():
        for source, sender in movers.items():
            if source == target:
                continue
            transport, why = choose(source, sender, target, receiver)
            peer = peers.get((source, target), {})
            measured = {name: peer[name] for name in NodeLink._field_defaults if name in peer}
            made.append(NodeLink(source, target, transport, why, **measured))
    return made


def slow_nodes(links: Sequence[NodeLink]) -> Iterator[tuple[str, str]]:
    """Yield each node that is far slower than the others, and in what: to give, or to get."""
    rates = sorted(link.bytes_per_s for link in links if link.bytes_per_s)
    for place, does in ((0, "gives its blocks"), (1, "gets blocks")):
        its: dict[str, list[float]] = {}
        for link in links:
            if link.bytes_per_s:
                its.setdefault(str(link[place]), []).append(link.bytes_per_s)
        for node, own in its.items():
            num_others = len(rates) - len(own)
            if not num_others:
                continue
            # If all of its own are slower, it is the median of the others.
            typical = rates[-(num_others - num_others // 2)]
            if max(own) * _SLOW < typical:
                yield (
                    node,
                    f"{does} at {rate_text(max(own))} at most, others at {rate_text(typical)}",
                )


def rate_text(bytes_per_s: float | None) -> str:
    """Return a rate, always in the same unit; empty if nothing was measured."""
    if not bytes_per_s:
        return ""
    rate = bytes_per_s / 2**20
    return f"{rate:,.0f} MiB/s" if rate >= 10 else f"{rate:.1f} MiB/s"


def choose(
    source: str, sender: dict[str, Any], target: str, receiver: dict[str, Any]
) -> tuple[str | None, str]:
    """Return the transport that two movers use, unless it keeps failing, and the reason."""
    for node, mover in ((source, sender), (target, receiver)):
        if mover["state"] != "serving":
            return None, f"the mover of {node} is {mover['state']}: {mover.get('message', '')}"
    lacking: list[str] = []
    common: list[str] = []
    for name, mine in receiver["transports"].items():
        theirs = sender["transports"].get(name, {"available": False, "reason": "not configured"})
        missing = [
            f"{node} has no {name}: {str(end['reason']).partition(';')[0]}"
            for node, end in ((source, theirs), (target, mine))
            if not end["available"]
        ]
        lacking += missing
        if not missing:
            common.append(name)
    failing = {
        link["transport"]: f"{link['transport']} keeps failing from {source}: {link['error']}"
        for link in receiver.get("failing_links", [])
        if link["left_out"] and node_of(link["source"]) == source
    }
    if not common:
        return None, "; ".join(lacking) or "no transport is configured"
    # A transport that is left out counts as missing, unless there is no other.
    usable = [name for name in common if name not in failing]
    lacking += [why for name, why in failing.items() if name in common]
    common = usable or common
    name = common[0]
    best = "the first of staging.transports that both have"
    if name == "nixl":
        has_rdma = all(end["transports"][name].get("rdma") for end in (receiver, sender))
        best = f"both have it; {'RDMA' if has_rdma else 'TCP: no RDMA device'}"
    return name, "; ".join(lacking) or best


def node_links_table(links: list[NodeLink]) -> Table:
    """Return one row for each link."""
    rest = ("state", "why")
    table = empty_table(
        "from", "to", "transport", numbers=["measured"], rest=rest, title="Between nodes"
    )
    for link in links:
        rate = rate_text(link.bytes_per_s)
        if not rate and link.latency_s:
            rate = f"{1000 * link.latency_s:,.0f} ms"
        state = "" if link.breaker == "closed" else link.breaker
        why = f"{link.why}; last error: {link.error}" if link.error and state else link.why
        red = [Text(one, style="red") for one in ("none", state)]
        table.add_row(link.source, link.target, link.transport or red[0], rate, red[1], why)
    return table
