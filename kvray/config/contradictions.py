"""Settings that are fine one by one and do not go together. Pure."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvray.config.document import SettingPath
from kvray.config.environment import variable_of
from kvray.config.schema import NOT_BY_LABEL
from kvray.config.sections import KVRayConfig, NodeConfig
from kvray.config.sizes import exact_size

_PAGE_BYTES = 4096
_SOCKET = "socket"
_SOCKET_PATH_MAX = 107
"""Bytes that the kernel takes for the path of a unix socket."""
_QUOTA_DIGITS = 8
"""Of a namespace's digest, as many as the arena knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """What does not go together, and what to do about it."""

    path: SettingPath
    """The setting that is best changed."""
    sentence: str


def first_contradiction(config: KVRayConfig) -> Contradiction | None:
    """Return the first contradiction in what holds on one node; None: there is none."""
    for check in _CHECKS:
        for found in check(config):
            return found
    return None


def quota_contradiction(config: KVRayConfig) -> Contradiction | None:
    """Return the first quota that is no bound on any node: it was meant for something else.

    Nodes differ, so that one which bounds on the largest only is fine.
    """
    largest = max(values_on_nodes(config, "arena", "capacity"))
    arena, security = config.arena, config.security
    quotas: dict[SettingPath, int | None] = {
        ("arena", "namespace_quota"): arena.namespace_quota,
        ("security", "tenant_quota"): security.tenant_quota,
        **{("arena", "quotas", name): size for name, size in arena.quotas.items()},
        **{
            ("security", "tenant_quotas", name): size
            for name, size in security.tenant_quotas.items()
        },
    }
    for path, size in quotas.items():
        if size is not None and size > largest:
            return Contradiction(
                path=path,
                sentence=f"{'.'.join(path)} ({exact_size(size)}) is larger than arena.capacity"
                f" ({exact_size(largest)}) and would bound nothing; lower it, or raise"
                " arena.capacity.",
            )
    return None


def node_contradiction(entry: NodeConfig, index: int) -> Contradiction | None:
    """Return what an entry of `nodes` may not say, or that it says nothing."""
    for dotted in NOT_BY_LABEL:
        section, _, name = dotted.partition(".")
        if name in getattr(entry, section):
            return Contradiction(
                path=("nodes", str(index), section, name),
                sentence=f"{dotted} cannot differ by label, because engines read it too and do not"
                f" know Ray's labels; set {variable_of(dotted)} in the environment of the node's"
                " Ray and of its engines.",
            )
    if not entry.arena and not entry.nvme:
        return Contradiction(
            path=("nodes", str(index)),
            sentence=f"The entry for {entry.label} in nodes changes nothing; give it settings in"
            " arena or nvme, or remove it.",
        )
    return None


def values_on_nodes(config: KVRayConfig, section: str, name: str) -> list[Any]:
    """Return every value that a setting has on some node by its label, the tier's own first."""
    own = getattr(getattr(config, section), name)
    given = [getattr(entry, section) for entry in config.nodes]
    return [own, *(one[name] for one in given if name in one)]


def _slots(config: KVRayConfig) -> Iterator[Contradiction]:
    arena = config.arena
    if arena.slot_min > arena.capacity:
        yield Contradiction(
            path=("arena", "capacity"),
            sentence=f"An arena of {exact_size(arena.capacity)} (arena.capacity) holds no slot of"
            f" {exact_size(arena.slot_min)} (arena.slot_min); raise arena.capacity.",
        )
    if arena.slot_min > arena.slab:
        yield Contradiction(
            path=("arena", "slab"),
            sentence=f"arena.slab ({exact_size(arena.slab)}) is smaller than arena.slot_min"
            f" ({exact_size(arena.slot_min)}), but slots are cut from slabs; raise arena.slab, or"
            " lower arena.slot_min.",
        )
    if "slab" in arena.model_fields_set and arena.slab > arena.capacity:
        yield Contradiction(
            path=("arena", "slab"),
            sentence=f"arena.slab ({exact_size(arena.slab)}) is larger than arena.capacity"
            f" ({exact_size(arena.capacity)}); lower arena.slab, or leave it out.",
        )


def _segments(config: KVRayConfig) -> Iterator[Contradiction]:
    nvme, slot_min = config.nvme, config.arena.slot_min
    if nvme.segment >= nvme.capacity:
        yield Contradiction(
            path=("nvme", "segment"),
            sentence=f"nvme.capacity ({exact_size(nvme.capacity)}) holds no file of nvme.segment"
            f" ({exact_size(nvme.segment)}) with its table; lower nvme.segment, or raise"
            " nvme.capacity.",
        )
    if nvme.dir is None:
        return
    if slot_min % _PAGE_BYTES:
        yield Contradiction(
            path=("arena", "slot_min"),
            sentence=f"arena.slot_min ({exact_size(slot_min)}) must be a multiple of 4KiB for"
            f" blocks on disk; write {exact_size(-(-slot_min // _PAGE_BYTES) * _PAGE_BYTES)}.",
        )
    if nvme.segment % slot_min:
        yield Contradiction(
            path=("nvme", "segment"),
            sentence=f"nvme.segment ({exact_size(nvme.segment)}) must be a multiple of"
            f" arena.slot_min ({exact_size(slot_min)}); write"
            f" {exact_size(-(-nvme.segment // slot_min) * slot_min)}.",
        )
    reached = 1 - config.arena.free_target
    if nvme.high_watermark >= reached:
        yield Contradiction(
            path=("nvme", "high_watermark"),
            sentence=f"nvme.high_watermark ({nvme.high_watermark:g}) is never reached, because"
            f" arena.free_target ({config.arena.free_target:g}) keeps the arena at most"
            f" {reached:g} full; lower one of the two.",
        )


def _quota_names(config: KVRayConfig) -> Iterator[Contradiction]:
    known: dict[str, str] = {}
    for name in config.arena.quotas:
        other = known.setdefault(name[:_QUOTA_DIGITS], name)
        if other != name:
            yield Contradiction(
                path=("arena", "quotas", name),
                sentence=f"arena.quotas names {other} and {name}, of which kvray tells the first"
                f" {_QUOTA_DIGITS} digits only; keep one of the two.",
            )


def _heartbeats(config: KVRayConfig) -> Iterator[Contradiction]:
    shard = config.shard
    if shard.heartbeat_s >= shard.silent_s:
        yield Contradiction(
            path=("shard", "silent_s"),
            sentence=f"Between two heartbeats ({shard.heartbeat_s:g} s, shard.heartbeat_s) a shard"
            f" would count as silent ({shard.silent_s:g} s, shard.silent_s); raise shard.silent_s"
            f" to {3 * shard.heartbeat_s:g}.",
        )


def _transports(config: KVRayConfig) -> Iterator[Contradiction]:
    given = config.staging.transports
    if len(set(given)) < len(given):
        unique = ", ".join(dict.fromkeys(given))
        yield Contradiction(
            path=("staging", "transports"),
            sentence=f"staging.transports names one way twice; write [{unique}].",
        )


def _socket_path(config: KVRayConfig) -> Iterator[Contradiction]:
    length = len(os.fsencode(config.node_dir / _SOCKET))
    if length > _SOCKET_PATH_MAX:
        yield Contradiction(
            path=("arena", "dir"),
            sentence=f"The shard's socket in {config.node_dir} would have a path of {length} bytes,"
            f" and the kernel takes {_SOCKET_PATH_MAX}; shorten arena.dir or cluster_name.",
        )


_CHECKS: tuple[Callable[[KVRayConfig], Iterator[Contradiction]], ...] = (
    _slots,
    _segments,
    _quota_names,
    _heartbeats,
    _transports,
    _socket_path,
)
