"""`kvray status`: the tier as its parts report it; `kvray probe`: whether a shard serves."""

import contextlib
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from kvray.actors.names import node_of
from kvray.actors.tier.sizing import combined
from kvray.cli import hits
from kvray.cli.asking import open_client, show_answer
from kvray.cli.size import sizing_line
from kvray.cli.transports import node_links, node_links_table
from kvray.config import format_size, load_config
from kvray.console.options import AddressOption, ConfigOption, JsonOption, flag
from kvray.console.output import empty_table, printer, visible
from kvray.errors import ConfigError, KVRayError, ShardUnavailable
from kvray.metrics import figure
from kvray.trace.reasons import MISS_PREFIX

if TYPE_CHECKING:
    from kvray.client import Client

_WATCH_S = 2.0
_ANSWER_S = 5.0
"""Time that a watched tier has for its answer."""
_COLUMNS = {
    "host": {
        "blocks": "resident_blocks",
        "leased": "leased_blocks",
        "evicted": "evicted_blocks_total",
        "dropped": "dropped_blocks_total",
        "corrupt": "corrupt_blocks_total",
    },
    "nvme": {
        "blocks": "resident_blocks",
        "demoted": "demoted_blocks_total",
        "refused": "refused_blocks_total",
        "promoted": "promoted_blocks_total",
        "evicted": "evicted_blocks_total",
        "corrupt": "corrupt_blocks_total",
        "written": "nvme_written_bytes_total",
        "read": "nvme_read_bytes_total",
    },
    "lookup": {
        "keys": "lookup_keys",
        "entries": "lookup_entries",
        "memory": "lookup_bytes",
        "queries": "lookup_queries_total",
        "resyncs": "lookup_resyncs_total",
    },
}
"""Columns of tables, by tier or part, with the metrics that they show."""
_SLAB_COLUMNS = ("block", "slabs", "blocks", "free", "longest\nrun", "frag-\nmented", "wasted")
_COUNTED = {"requests": "requests", "prompt_tokens": "prompt\ntokens"}
_ELSEWHERE = re.compile("_ns_below_|_us_sum$|^uptime_s$|^hit_tokens|^local_tokens$|^fingerprint_")
"""Counters that other columns, the metrics or sentences show."""
EXIT_NOT_SERVING = 1


def status(
    config: ConfigOption = None,
    address: AddressOption = None,
    watch: Annotated[
        bool, flag("--watch", f"Show it every {_WATCH_S:.0f} s, until Ctrl-C.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the shards with their memory, the lookup, and the replicas with their hits."""
    if watch and as_json:
        raise ConfigError("--watch shows a text; take --json without it, in a loop.")
    with open_client(config, address) as client:
        if watch:
            _watch(client, printer())
            return
        found = client.status()
    show_answer(found, _report, as_json=as_json)


def _watch(client: "Client", console: Console) -> None:
    """Show the status until Ctrl-C, also while no tier answers."""
    said: list[Table | str] = []
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=console.is_terminal, auto_refresh=False) as live,
    ):
        while True:
            try:
                said = list(_report(visible(client.status(timeout_s=_ANSWER_S))))
                trouble = []
            except KVRayError as error:
                trouble = [f"No answer: {visible(' '.join(str(error).split()))} Trying again."]
            live.update(Group(*trouble, *said), refresh=True)
            time.sleep(_WATCH_S)


def _report(found: dict[str, Any]) -> Iterator[Table | str]:
    shards, lookup = found["shards"], found["lookup"]
    count = f"{len(shards)} shard{'' if len(shards) == 1 else 's'}"
    yield f"Tier {found['cluster_name']}: {count}, {lookup_sentence(lookup)}"
    if "partitions" in lookup:
        yield lookups_table(lookup["partitions"])
    yield shards_table(shards)
    if any(_slabs_of(shard) for shard in shards):
        yield memory_table(shards)
    yield from shares_report(shards)
    if any("nvme" in shard for shard in shards):
        yield nvme_table(shards)
    for shard in shards:
        name = shard["shard"]
        if shard.get("message"):
            yield f"{name}: {shard['message']}"
        if stopped := shard.get("stopped_with_lock"):
            pid = stopped["pid"]
            yield (
                f"{name}: process {pid} ({stopped['name']}) is stopped while it has the arena's"
                f" lock; continue it with `kill -CONT {pid}`, or the shard ends it."
            )
        if (drain := shard.get("drain")) is not None:
            yield drain_sentence(name, drain)
        yield from (f"{name}: {one}" for one in shard.get("nvme", {}).get("remarks", ()))
    if between := node_links(found):
        yield node_links_table(between)
    yield from _replicas_report(shards)
    yield "Watch it in a browser: `kvray dashboard serve`."


def _replicas_report(shards: list[dict[str, Any]]) -> Iterator[Table | str]:
    replicas, ended = hits.ranks_of(shards), hits.ended_of(shards)
    if not replicas and not ended:
        yield "No replica has registered yet."
        return
    totals = hits.total_counters([*replicas, *ended])
    if totals["prompt_tokens"]:
        yield f"{totals['prompt_tokens']:,} prompt tokens: {hits.sources_sentence(totals)}"
    if replicas:
        yield replicas_table(replicas)
        yield sizing_line(combined(shards))
    if ended:
        yield ended_line(ended)
    for says, fix in unnamed_sentences(replicas):
        yield f"{says}; {fix}."
    yield from namespaces_report(shards) or ()
    published = [(shard["shard"], shard["events"]) for shard in shards if "events" in shard]
    if published:
        table = empty_table("replica", "events", "replays", title="KV events")
        for _, events in published:
            for replica, (live, replay) in events["replicas"].items():
                table.add_row(replica, live, replay)
        yield table
    yield from (f"{name}: {one['problem']}" for name, one in published if one["problem"])


def state_text(shard: Mapping[str, Any]) -> str:
    """Return the state of a shard, and how far it is."""
    state = str(shard["state"])
    if state in ("preparing", "flushing"):
        return f"{state} {100 * shard['done'] // max(1, shard['total'])} %"
    return state


def lookup_sentence(lookup: Mapping[str, Any]) -> str:
    """Return what the lookup knows, or that it does not answer."""
    if "keys" not in lookup:
        return f"the lookup does not answer: {lookup['message']}"
    return f"the lookup knows {figure(lookup, 'lookup_keys'):,} keys"


def lookups_table(partitions: Sequence[Mapping[str, Any]]) -> Table:
    """Return one row for each partition of the lookup."""
    numbers = (*_COLUMNS["lookup"],)
    table = empty_table("lookup", "state", numbers=numbers, title="Partitions of the lookup")
    for one in partitions:
        found = (one["state"],) if "state" in one else ("answers", *_cells(one, "lookup"))
        table.add_row(one["lookup"], *found)
    return table


def shards_table(shards: list[dict[str, Any]]) -> Table:
    """Return one row for each shard."""
    numbers = (*_COLUMNS["host"],)
    table = empty_table("node", "state", "memory", numbers=numbers, title="Shards")
    for shard in shards:
        found: list[str] = []
        if (arena := shard.get("arena")) is not None:
            used, size = arena["resident_bytes"], arena["capacity_bytes"]
            found = [f"{format_size(used)}/{format_size(size)}", *_cells(shard, "host")]
        table.add_row(node_of(shard["shard"]), state_text(shard), *found)
    return table


def _cells(status: Mapping[str, Any], part: str) -> list[str]:
    """Return the figures of a status in the columns of a tier or part."""
    found = {name: figure(status, name, tier=part) for name in _COLUMNS[part].values()}
    return [format_size(one) if "_bytes" in name else str(one) for name, one in found.items()]


def memory_table(shards: list[dict[str, Any]]) -> Table:
    """Return one row for each block size of each shard, and one for its spare slabs."""
    table = empty_table("node", numbers=_SLAB_COLUMNS, title="Memory by block size")
    for shard in shards:
        for use in _slabs_of(shard):
            wasted = use["slot_waste_bytes"] + use["slab_waste_bytes"]
            table.add_row(
                node_of(shard["shard"]),
                format_size(use["block_bytes"]),
                *(str(use[name]) for name in ("slabs", "blocks", "free_slots", "longest_free_run")),
                f"{use['fragmented_share']:.0%}",
                format_size(wasted) if wasted else "0",
            )
        if _slabs_of(shard):
            table.add_row(node_of(shard["shard"]), "spare", str(shard["arena"]["spare_slabs"]))
    return table


def nvme_table(shards: list[dict[str, Any]]) -> Table:
    """Return one row for each shard that keeps blocks on disk."""
    numbers = (*_COLUMNS["nvme"],)
    table = empty_table("node", "files", numbers=numbers, rest=[""], title="On disk")
    for shard in shards:
        if (nvme := shard.get("nvme")) is not None:
            table.add_row(
                node_of(shard["shard"]),
                f"{format_size(nvme['file_bytes'])}/{format_size(nvme['capacity_bytes'])}",
                *_cells(shard, "nvme"),
                disk_remark(nvme)[0],
            )
    return table


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
    """Return "320 not stored" and the like, the largest first."""
    found = sorted((-value, name) for name, value in counters.items() if value)
    return [f"{-value} {name.removeprefix(MISS_PREFIX).replace('_', ' ')}" for value, name in found]


def _slabs_of(shard: dict[str, Any]) -> list[dict[str, Any]]:
    return list(shard.get("arena", {}).get("slabs", []))


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
    timeout: Annotated[
        float, typer.Option(min=0.01, max=60, help="Longest wait for the answer, in seconds.")
    ] = 1.0,
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
    left = format_size(found["left_bytes"])
    seconds = "" if found["seconds_left"] is None else f" within {found['seconds_left']:.0f} s"
    who = " and ".join(found["by"])
    says = {
        "moving": f"is being drained{seconds} (requested by {who}): {moved}, {left} are left",
        "moved": f"is drained and may be removed: {moved}",
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
        "Replicas in different columns share no blocks; to have them share, start them with the"
        " same model and engine arguments."
        + (f" {more} more namespaces are in kvray status --json." if more > 0 else "")
    )


def unnamed_sentences(replicas: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield (the reason, the remedy) for each rank that has no keys yet."""
    for replica in replicas:
        counters = replica["counters"]
        if replica["connected"] and "fingerprint_bytes" in counters:
            who = f"replica {replica['replica']} rank {replica['rank']}"
            if counters.get("fingerprint_failed"):
                yield (
                    f"{who} cannot read its checkpoint, and uses no tier",
                    "look at its log for the reason, or name the model in connector.model_key",
                )
            else:
                total, done = (
                    counters["fingerprint_bytes"],
                    counters.get("fingerprint_bytes_read", 0),
                )
                left_s = (total - done) * counters.get("uptime_s", 0) // max(done, 1)
                yield (
                    f"{who} uses no tier until it has read its checkpoint: {format_size(done)} of"
                    f" {format_size(total)} read" + (f", about {left_s} s left" if done else ""),
                    "wait, or name the model in connector.model_key",
                )
