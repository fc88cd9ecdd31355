"""`kvray status`: the tier as its parts report it; `kvray probe`: whether a shard serves."""

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from kvray.actors.hosts import node_meant
from kvray.actors.names import node_of
from kvray.actors.tier.sizing import combined
from kvray.cli import hits
from kvray.cli.asking import duration, for_people, open_client, show_answer
from kvray.cli.explain import age_text
from kvray.cli.size import sizing_line
from kvray.cli.transports import NodeLink, node_links, node_links_table, slow_nodes
from kvray.config import format_size, load_config
from kvray.console.options import AddressOption, ConfigOption, JsonOption, flag
from kvray.console.output import empty_table, printer, visible
from kvray.errors import ConfigError, KVRayError, ShardUnavailable
from kvray.metrics import METRICS, PREFIX, figure
from kvray.trace.reasons import MISS_PREFIX

_WATCH_S = 2.0
_ANSWER_S = 5.0
"""Time that a watched tier has for its answer."""
_PARTS_MAX = 8
"""Columns of one table of counters."""
_COUNTED = {"requests": "requests", "prompt_tokens": "prompt\ntokens"}
_ELSEWHERE = re.compile("_ns_below_|_us_sum$|^uptime_s$|^hit_tokens|^local_tokens$|^fingerprint_")
"""Counters that other columns, the metrics or sentences show."""
EXIT_NOT_SERVING = 1


def status(
    node: Annotated[
        str | None,
        typer.Argument(metavar="NODE", help="Only this one: its host's name or IP, or its id."),
    ] = None,
    watch: Annotated[
        bool, flag("--watch", f"Show it every {_WATCH_S:.0f} s, until Ctrl-C.")
    ] = False,
    wide: Annotated[
        bool, flag("--wide", "Ids of nodes too, every counter, and a row for each replica.")
    ] = False,
    config: ConfigOption = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how full the nodes are, where prompt tokens come from, and what is wrong."""
    if watch and as_json:
        raise ConfigError("--watch shows a text; take --json without it, in a loop.")

    console = printer()  # before what Ray prints goes to stderr
    with open_client(config, address) as client:

        def ask(timeout_s: float | None = None) -> dict[str, Any]:
            found = client.status(timeout_s=timeout_s)
            return found if node is None else _of_node(found, node)

        if watch:
            _watch(ask, console, wide=wide)
            return
        found = ask()
    show_answer(found, lambda told: _report(told, wide=wide), as_json=as_json, with_ids=wide)


def _of_node(found: dict[str, Any], node: str) -> dict[str, Any]:
    """Return what a status has of one node."""
    meant = node_meant(node, found["hosts"])
    parts = {
        kind: [one for one in found[kind] if node_of(one[kind[:-1]]) == meant]
        for kind in ("shards", "movers")
    }
    return {**found, **parts, "num_nodes": len(found["shards"])}


def _watch(ask: Callable[[float], dict[str, Any]], console: Console, *, wide: bool) -> None:
    """Show the status until Ctrl-C, also while no tier answers."""
    said: list[Table | str] = []
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=console.is_terminal, auto_refresh=False) as live,
    ):
        while True:
            try:
                said = list(_report(for_people(ask(_ANSWER_S), with_ids=wide), wide=wide))
                trouble = []
            except KVRayError as error:
                trouble = [f"No answer: {visible(' '.join(str(error).split()))} Trying again."]
            live.update(Group(*trouble, *said), refresh=True)
            time.sleep(_WATCH_S)


def _report(found: dict[str, Any], *, wide: bool = False) -> Iterator[Table | str]:
    shards = found["shards"]
    yield headline(found)
    ranks, ended = hits.ranks_of(shards), hits.ended_of(shards)
    totals = hits.total_counters([*ranks, *ended])
    if prompt := totals["prompt_tokens"]:
        sources = hits.sources_sentence(totals)
        yield f"{hits.hit_share(totals)} of {prompt:,} prompt tokens so far were hits: {sources}"
        yield sizing_line(combined(shards))
    if times := hits.first_token_texts(found):
        yield "Time to the first token, last 10 min, as the router sees it: p50 {}, p90 {}".format(
            *times
        )
    yield nodes_table(shards)
    for shard in shards:
        name = node_of(shard["shard"])
        yield from (f"{name}: {one}" for one in faults_of(shard))
        if (drain := shard.get("drain")) is not None:
            yield drain_sentence(name, drain)
        yield from (f"{name}: {one}" for one in shard.get("nvme", {}).get("remarks", ()))
    links = node_links(found)
    for link in links:
        if link.transport is None or link.breaker != "closed":
            yield f"No block comes from {link.source} to {link.target}: {link.error or link.why}"
    yield from (f"{node} {says}." for node, says in slow_nodes(links))
    yield from (f"{node} {says}." for node, says in lost_nodes(found))
    yield replicas_sentence(ranks)
    for says, fix in unnamed_sentences(ranks):
        yield f"{says}; {fix}."
    if wide:
        yield from _tables(found, ranks, links)
        yield from [ended_line(ended)] if ended else []
    else:
        yield "More: `kvray status --wide`; in a browser: `kvray dashboard serve`."


def _tables(
    found: dict[str, Any], ranks: Sequence[Mapping[str, Any]], links: list[NodeLink]
) -> Iterator[Table | str]:
    """Yield every counter that there is."""
    shards, lookup = found["shards"], found["lookup"]
    parts = {one["lookup"]: one for one in lookup.get("partitions", [{**lookup, "lookup": "all"}])}
    yield from counter_tables("Lookup", parts, "lookup")
    yield from counter_tables("Nodes", {node_of(one["shard"]): one for one in shards}, "shard")
    yield from shares_report(shards)
    if links:
        yield node_links_table(links)
    if ranks:
        yield replicas_table(ranks)
    yield from namespaces_report(shards) or ()
    replays = [one["events"]["replicas"] for one in shards if "events" in one]
    if replays:
        table = empty_table("replica", "events", "replays", title="KV events")
        for replica, addresses in (pair for one in replays for pair in one.items()):
            table.add_row(replica, *addresses)
        yield table


def headline(found: Mapping[str, Any]) -> str:
    """Return which tier it is, since when and where it runs, and what its lookup knows."""
    shards = found["shards"]
    nodes = f"{len(shards)} node{'' if len(shards) == 1 else 's'}"
    if (num_nodes := found.get("num_nodes", len(shards))) > len(shards):
        nodes = f"{len(shards)} of its {num_nodes} nodes,"
    elif num_silent := sum(one["state"] == "unreachable" for one in shards):
        nodes = f"{len(shards) - num_silent} of {nodes} answer{'s' if len(shards) == 1 else ''},"
    version = (
        f" (kvray {found['version']}, Ray at {found['address']})" if "version" in found else ""
    )
    up_s = max((one.get("uptime_s", 0.0) for one in shards), default=0.0)
    up = f" up {age_text(up_s)}" if up_s else ""
    nodes = f"{nodes}{up}".rstrip(",")
    return f"Tier {found['cluster_name']}{version}: {nodes}; {lookup_sentence(found['lookup'])}."


def lost_nodes(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each node that Ray lost lately, and what happened to it."""
    for node, s_ago in found.get("lost", {}).items():
        yield node, f"left Ray {age_text(s_ago)} ago, and its blocks in memory with it"


def nodes_table(shards: list[dict[str, Any]]) -> Table:
    """Return one row for each node: how full it is, where its prompt tokens come from, faults."""
    sources = [name.replace(" ", "\n") for name in hits.SOURCES]
    has_disk = any("nvme" in shard for shard in shards)
    room = ("memory\nfull of", "disk\nfull of") if has_disk else ("memory\nfull of",)
    numbers = ("up", *room, *sources, "evicted\nblocks", "faults")
    table = empty_table("node", "state", numbers=numbers, folds=True)
    for column in table.columns[1:]:
        column.no_wrap = True
    for shard in shards:
        full = [_full(*one) for one in (memory_used(shard), disk_used(shard))[: len(room)]]
        shares = hits.source_shares(hits.total_counters(shard.get("replicas", ())))
        table.add_row(
            node_of(shard["shard"]),
            state_text(shard),
            age_text(shard["uptime_s"]) if "uptime_s" in shard else "",
            *full,
            *(shares[name] for name in hits.SOURCES),
            f"{figure(shard, 'evicted_blocks_total', tier='host'):,}" if "arena" in shard else "",
            str(len(list(faults_of(shard))) or ""),
        )
    return table


def memory_used(shard: Mapping[str, Any]) -> tuple[int, int]:
    """Return the bytes of a node's memory that slots with blocks take, and all; 0: not known."""
    arena = shard.get("arena")
    return (0, 0) if arena is None else (arena["taken_bytes"], arena["capacity_bytes"])


def disk_used(shard: Mapping[str, Any]) -> tuple[int, int]:
    """Return the bytes of a node's files on disk, and the most that they may have."""
    nvme = shard.get("nvme")
    return (0, 0) if nvme is None else (nvme["file_bytes"], nvme["capacity_bytes"])


def _full(used: int, size: int) -> str:
    return f"{used / size:.0%} {format_size(size)}" if size else ""


def faults_of(shard: Mapping[str, Any]) -> Iterator[str]:
    """Yield what does not work on a node, each with what to do where that is known."""
    if shard.get("message"):
        yield str(shard["message"])
    if stopped := shard.get("stopped_with_lock"):
        pid = stopped["pid"]
        yield (
            f"process {pid} ({stopped['name']}) is stopped while it has the arena's lock; continue"
            f" it with `kill -CONT {pid}`, or unpause its container, or the shard ends it."
        )
    yield from (f"{says}; {fix}." for says, fix in corrupt_remarks(shard))
    if shard.get("nvme", {}).get("message"):
        yield f"the disk {'; '.join(disk_remark(shard['nvme']))}."
    if problem := shard.get("events", {}).get("problem"):
        yield str(problem)


def corrupt_remarks(shard: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is known of blocks with wrong bytes, and the remedy."""
    here, came = "test this node's memory and disk", "test the network, and memory and disk there"
    for tiers, where, test in (
        (("host", "nvme"), "", here),
        (("staging",), " from elsewhere", came),
    ):
        if count := sum(figure(shard, "corrupt_blocks_total", tier=tier) for tier in tiers):
            says = f"{count:,} blocks{where} did not have their checksum and were not used"
            yield says, f"run `kvray verify`, and {test}"


def replicas_sentence(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Return how many replicas use the tier, and whether they can share."""
    if not ranks:
        return "No replica has registered yet."
    there = [one for one in ranks if one["connected"]]
    gone = f", {len(ranks) - len(there)} gone" if len(there) < len(ranks) else ""
    line = f"{len({one['replica'] for one in there})} replicas, {len(there)} ranks{gone}."
    named = [one for one in there if one.get("is_named", True)]
    if (spaces := len({one["namespace"] for one in named})) > 1:
        line += (
            f" They are in {spaces} namespaces, which share no blocks, unless they differ in their"
            " number of ranks alone; `kvray status --wide` shows in what they differ."
        )
    return line


def state_text(shard: Mapping[str, Any]) -> str:
    """Return the state of a shard, and how far it is."""
    state = str(shard["state"])
    if state in ("preparing", "flushing"):
        return f"{state} {100 * shard['done'] // max(1, shard['total'])} %"
    return state


def lookup_sentence(lookup: Mapping[str, Any]) -> str:
    """Return what the lookup knows, or that it does not answer."""
    if "keys" not in lookup:
        return f"the lookup does not answer: {str(lookup['message']).rstrip('.')}"
    return f"the lookup knows {figure(lookup, 'lookup_keys'):,} keys"


def counter_tables(
    title: str, parts: Mapping[str, Mapping[str, Any]], part: str
) -> Iterator[Table]:
    """Yield a row for each metric of a kind of part, and a column for each part by its name."""
    names = [*parts]
    for first in range(0, len(names), _PARTS_MAX):
        shown = names[first : first + _PARTS_MAX]
        table = empty_table(title, numbers=shown, folds=True)
        for metric in METRICS.values():
            read = [metric.read(parts[name]) if metric.part == part else {} for name in shown]
            for own in {own: None for one in read for own in one}:
                name = metric.name.removeprefix(PREFIX).removesuffix("_total")
                values = [_counted(name, one[own])[0] if own in one else "" for one in read]
                table.add_row(" ".join((_counted(name, 0)[1], *own)), *values)
        yield table


def replicas_table(replicas: Sequence[Mapping[str, Any]]) -> Table:
    """Return one row for each rank; counters that are zero or unknown are left out."""
    numbers = [
        name.replace(" ", "\n") for name in (*_COUNTED.values(), *hits.SOURCES, hits.COMPUTED)
    ]
    table = empty_table("replica", numbers=("rank", *numbers), title="Replicas")
    table.add_column("misses", no_wrap=True)
    table.add_column("others")
    for replica in replicas:
        counters = replica["counters"]
        misses = {name: value for name, value in counters.items() if name.startswith(MISS_PREFIX)}
        others = {
            name: value
            for name, value in counters.items()
            if not (name in misses or name in _COUNTED or _ELSEWHERE.search(name))
        }
        gone = [] if replica["connected"] else ["gone"]
        table.add_row(
            replica["replica"],
            str(replica["rank"]),
            *(str(counters.get(name, "")) for name in _COUNTED),
            *hits.source_shares(counters).values(),
            "\n".join(_named(misses)),
            ", ".join(gone + _named(others)),
        )
    return table


def ended_line(ended: Sequence[Mapping[str, Any]]) -> str:
    """Return the sums of ranks that ended a while ago."""
    line = f"{sum(one['ranks'] for one in ended)} ranks ended before and are not listed"
    totals = hits.total_counters(ended)
    if not totals["prompt_tokens"]:
        return f"{line}."
    return f"{line}: {totals['requests']:,} requests, {totals['hit_tokens']:,} hit tokens."


def _named(counters: Mapping[str, int]) -> list[str]:
    """Return "320 not stored" and the like with units, the largest first."""
    found = sorted((-value, name) for name, value in counters.items() if value)
    return [" ".join(_counted(name.removeprefix(MISS_PREFIX), -value)) for value, name in found]


def _counted(name: str, value: float) -> tuple[str, str]:
    """Return a counter's value with its unit, and its name without it."""
    words, _, unit = name.rpartition("_")
    scale = {"us": 1e6, "seconds": 1.0, "s": 1.0}.get(unit)
    if scale is not None:
        return f"{value / scale:,.1f} s", words.replace("_", " ")
    if unit == "bytes":
        return format_size(int(value)), words.replace("_", " ")
    return f"{value:,}", name.replace("_", " ")


def disk_remark(nvme: Mapping[str, Any]) -> tuple[str, str]:
    """Return what is wrong with the disk, and the remedy; empty if nothing is."""
    if nvme["message"]:
        out = "is out, and the node goes on with its memory: " if nvme.get("state") == "out" else ""
        says = f"{out}{str(nvme['message']).rstrip('.')}"
        return says, "mend the disk; the shard then takes it back by itself"
    if nvme["segments_without_room"]:
        return "the disk is full", "free room on it, or lower nvme.capacity"
    if nvme["write_budget_bytes"] == 0:
        return "the day's budget of writes is used up", "raise nvme.write_gib_per_day"
    if nvme["is_direct"]:
        return "", ""
    says = "goes through the page cache, because its file system has no direct I/O"
    return says, "put nvme.dir on ext4 or xfs on a local disk"


def probe(
    config: ConfigOption = None,
    timeout: Annotated[float, duration("Longest wait for the answer.", 0.01, 60)] = 1.0,
) -> None:
    """Ask this node's shard over its socket whether it serves.

    Needs no Ray. Run it as the user of the shard, with the configuration of this node. Engines
    need no such probe: they serve on without a shard.
    """
    from kvray.node.stage_calls import ShardSocket

    shard = ShardSocket(load_config(config).node_dir)
    try:
        answer = shard.call("hello", timeout_s=timeout)
    except ShardUnavailable as error:
        print(f"kvray: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_NOT_SERVING) from None
    finally:
        shard.close()
    print(f"{answer['shard']} serves, epoch {answer['shard_epoch']}.")


_COLUMNS_MAX = 6
_NAMES_MAX = 4


def drain_sentence(shard: str, found: Mapping[str, Any]) -> str:
    """Return how far the drain of a shard is, as `kvray status` has it."""
    moved = f"{found['moved_blocks']:,} blocks ({format_size(found['moved_bytes'])}) are elsewhere"
    left, size = format_size(found["left_bytes"]), found["behind_bytes"]
    behind = f", and {format_size(size)} that others have no room for stay" if size else ""
    seconds = "" if found["seconds_left"] is None else f" within {found['seconds_left']:.0f} s"
    who = " and ".join(found["by"])
    says = {
        "moving": f"is being drained{seconds} (requested by {who}): {moved}, {left} are left",
        "moved": f"is drained and may be removed: {moved}{behind}",
        "late": f"has no time left to drain: {moved}, {left} are not",
    }[found["state"]]
    return f"{shard} {says}." + (f" {found['message']}" if found.get("message") else "")


def shares_report(shards: list[dict[str, Any]]) -> list[Table | str]:
    """Return the share of each namespace in each arena; nothing if one has all, without a quota."""
    held = [(shard, one) for shard in shards for one in _held(shard)]
    is_shared = any(len(_held(shard)) > 1 for shard in shards)
    if not is_shared and all(one["quota_bytes"] is None for _, one in held):
        return []
    numbers = ("blocks", "memory", "quota")
    table = empty_table("node", "namespace", numbers=numbers, title="Memory by namespace")
    for shard, one in held:
        quota = one["quota_bytes"]
        table.add_row(
            node_of(shard["shard"]),
            one["namespace"] or "not known",
            str(one["blocks"]),
            format_size(one["bytes"]),
            "" if quota is None else format_size(quota),
        )
    num_gone = sum(shard["arena"]["over_quota"] for shard in shards if _held(shard))
    gone = f"{num_gone} blocks were evicted because their namespace was over its quota."
    return [table, gone] if num_gone else [table]


def _held(shard: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the namespaces of an arena; nothing before it serves."""
    held: list[dict[str, Any]] = shard.get("arena", {}).get("namespaces", [])
    return held


def namespaces_report(shards: list[dict[str, Any]]) -> tuple[Table, str] | None:
    """Return a column for each namespace, of the fields that differ, and a sentence; or None."""
    namespaces = {
        digest: values for shard in shards for digest, values in shard.get("namespaces", {}).items()
    }
    # Those that are gone too: their blocks are here.
    replicas: dict[str, dict[str, None]] = {}
    for rank in hits.ranks_of(shards):
        name = rank["replica"] + ("" if rank["connected"] else " gone")
        replicas.setdefault(rank["namespace"], {})[name] = None
    for shard in shards:
        for tier in ("arena", "nvme"):
            for one in shard.get(tier, {}).get("namespaces", ()):
                replicas.setdefault(one["namespace"], {"no replica now": None})
    digests = [digest for digest in replicas if digest in namespaces]
    if len(digests) < 2:
        return None
    shown = digests[:_COLUMNS_MAX]
    table = Table(title="Namespaces", title_justify="left", box=box.SIMPLE)
    table.add_column("", no_wrap=True)
    for digest in shown:
        names, more = [*replicas[digest]][:_NAMES_MAX], len(replicas[digest]) - _NAMES_MAX
        names += [f"and {more} more"] if more > 0 else []
        table.add_column("\n".join([*names, digest]), overflow="fold")
    for field in {name: None for digest in shown for name in namespaces[digest]}:
        values = [str(namespaces[digest].get(field, "")) for digest in shown]
        if len(set(values)) > 1:
            table.add_row(field, *values)
    more = len(digests) - _COLUMNS_MAX
    return table, (
        "Replicas in different columns share no blocks, unless they differ in their number of ranks"
        " alone; to have them share, start them with the same model and engine arguments."
        + (f" {more} more namespaces are in kvray status --json." if more > 0 else "")
    )


def unnamed_sentences(replicas: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield (the reason, the remedy) for each rank that has no keys yet."""
    for replica in replicas:
        counters = replica["counters"]
        who = f"replica {replica['replica']} rank {replica['rank']}"
        if not replica["connected"]:
            continue
        if "fingerprint_bytes" not in counters:
            if counters and not replica.get("is_named", True):
                yield (
                    f"{who} uses no tier until the version of its weights is named",
                    "call Client.set_weights_version, or set connector.weights_version",
                )
        elif counters.get("fingerprint_failed"):
            yield (
                f"{who} cannot read its checkpoint, and uses no tier",
                "look at its log for the reason, or name the model in connector.model_key",
            )
        else:
            total, done = counters["fingerprint_bytes"], counters.get("fingerprint_bytes_read", 0)
            left_s = (total - done) * counters.get("uptime_s", 0) // max(done, 1)
            yield (
                f"{who} uses no tier until it has read its checkpoint: {format_size(done)} of"
                f" {format_size(total)} read" + (f", about {left_s} s left" if done else ""),
                "wait, or name the model in connector.model_key",
            )
