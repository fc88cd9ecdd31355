"""Settings that are fine one by one and contradict each other. Pure."""

import os
from collections.abc import Iterator
from typing import Any

from kvray.config.document import SettingPath
from kvray.config.environment import variable_of
from kvray.config.schema import NOT_BY_LABEL
from kvray.config.sections import ArenaConfig, KVRayConfig, NodeConfig
from kvray.config.values import exact_size

_PAGE_BYTES = 4096
_SOCKET_PATH_MAX = 107
"""Bytes that the kernel takes for the path of a unix socket."""
_QUOTA_DIGITS = 8
"""Hex digits of a namespace's digest that the arena knows."""

Contradiction = tuple[SettingPath, str]
"""The setting that is best changed, and the sentence with what to do about it."""


def first_contradiction(config: KVRayConfig) -> Contradiction | None:
    """Return the first contradiction in what holds on one node; None: there is none."""
    return next(_contradictions(config), None)


def quota_contradiction(config: KVRayConfig) -> Contradiction | None:
    """Return the first quota that is no bound on any node: a mistake in one of the two."""
    largest = max(values_on_nodes(config, "arena", "capacity"))
    arena, security = config.arena, config.security
    quotas: dict[SettingPath, int | None] = {
        ("arena", "namespace_quota"): arena.namespace_quota,
        ("security", "tenant_quota"): security.tenant_quota,
        **{("arena", "quotas", name): size for name, size in arena.quotas.items()},
        **{("security", "tenant_quotas", name): n for name, n in security.tenant_quotas.items()},
    }
    for path, size in quotas.items():
        if size is not None and size > largest:
            says = f"{'.'.join(path)} ({exact_size(size)}) is larger than arena.capacity"
            says += f" ({exact_size(largest)}) and would bound nothing"
            return path, f"{says}; lower it, or raise arena.capacity."
    return None


def node_contradiction(entry: NodeConfig, index: int) -> Contradiction | None:
    """Return what an entry of `nodes` may not say, or that it says nothing."""
    at = ("nodes", str(index))
    for dotted in NOT_BY_LABEL:
        section, _, name = dotted.partition(".")
        if name in getattr(entry, section):
            says = f"{dotted} cannot differ by label, because engines do not know Ray's labels"
            where = "in the environment of the node's Ray and of its engines"
            return (*at, section, name), f"{says}; set {variable_of(dotted)} {where}."
    if not entry.arena and not entry.nvme:
        says = f"The entry for {entry.label} in nodes changes nothing"
        return at, f"{says}; give it settings in arena or nvme, or remove it."
    return None


def values_on_nodes(config: KVRayConfig, section: str, name: str) -> list[Any]:
    """Return every value that a setting has on some node by its label, the tier's own first."""
    own = getattr(getattr(config, section), name)
    given = [getattr(entry, section) for entry in config.nodes]
    return [own, *(one[name] for one in given if name in one)]


def _contradictions(config: KVRayConfig) -> Iterator[Contradiction]:
    yield from _in_arena(config.arena)
    yield from _in_nvme(config)
    shard, ways = config.shard, config.staging.transports
    if shard.heartbeat_s >= shard.silent_s:
        says = f"A shard would count as silent ({shard.silent_s:g} s, shard.silent_s) between two"
        says += f" heartbeats ({shard.heartbeat_s:g} s, shard.heartbeat_s)"
        yield ("shard", "silent_s"), f"{says}; raise shard.silent_s to {3 * shard.heartbeat_s:g}."
    if len(unique := list(dict.fromkeys(ways))) < len(ways):
        says = "staging.transports names one transport twice"
        yield ("staging", "transports"), f"{says}; write [{', '.join(unique)}]."
    length = len(os.fsencode(config.node_dir / "socket"))
    if length > _SOCKET_PATH_MAX:
        says = f"The path of the shard's socket in {config.node_dir} would have {length} bytes,"
        says += f" and the kernel takes {_SOCKET_PATH_MAX}"
        yield ("arena", "dir"), f"{says}; shorten arena.dir or cluster_name."


def _in_arena(arena: ArenaConfig) -> Iterator[Contradiction]:
    capacity, slab, slot_min = (
        f"arena.{name} ({exact_size(getattr(arena, name))})"
        for name in ("capacity", "slab", "slot_min")
    )
    if arena.slot_min > arena.capacity:
        yield ("arena", "capacity"), f"{capacity} has no room for {slot_min}; raise arena.capacity."
    if arena.slot_min > arena.slab:
        says = f"{slab} is smaller than {slot_min}, but slots are cut from slabs"
        yield ("arena", "slab"), f"{says}; raise arena.slab, or lower arena.slot_min."
    if "slab" in arena.model_fields_set and arena.slab > arena.capacity:
        says = f"{slab} is larger than {capacity}"
        yield ("arena", "slab"), f"{says}; lower arena.slab, or leave it out."
    known: dict[str, str] = {}
    for name in arena.quotas:
        other = known.setdefault(name[:_QUOTA_DIGITS], name)
        if other != name:
            says = f"arena.quotas has {other} and {name}, and kvray compares the first"
            says += f" {_QUOTA_DIGITS} digits only"
            yield ("arena", "quotas", name), f"{says}; keep one of the two."


def _in_nvme(config: KVRayConfig) -> Iterator[Contradiction]:
    nvme, slot_min = config.nvme, config.arena.slot_min
    segment = f"nvme.segment ({exact_size(nvme.segment)})"
    slots = f"arena.slot_min ({exact_size(slot_min)})"
    if nvme.segment >= nvme.capacity:
        says = f"nvme.capacity ({exact_size(nvme.capacity)}) has no room for one file of {segment}"
        says += " with its table"
        yield ("nvme", "segment"), f"{says}; lower nvme.segment, or raise nvme.capacity."
    if nvme.dir is None:
        return
    if slot_min % _PAGE_BYTES:
        says = f"{slots} must be a multiple of 4KiB for blocks on disk"
        yield ("arena", "slot_min"), f"{says}; write {_multiple(slot_min, _PAGE_BYTES)}."
    if nvme.segment % slot_min:
        says = f"{segment} must be a multiple of {slots}"
        yield ("nvme", "segment"), f"{says}; write {_multiple(nvme.segment, slot_min)}."
    reached = 1 - config.arena.free_target
    if nvme.high_watermark >= reached:
        says = f"nvme.high_watermark ({nvme.high_watermark:g}) is never reached, because"
        says += f" arena.free_target ({config.arena.free_target:g}) keeps the arena at most"
        yield ("nvme", "high_watermark"), f"{says} {reached:g} full; lower one of the two."


def _multiple(size: int, unit: int) -> str:
    """Return the next multiple of `unit`, as a file has it."""
    return exact_size(-(-size // unit) * unit)
