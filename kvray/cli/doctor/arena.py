"""Checks whether a process here can use its node's arena: mount, user, file, lock, socket, clock.

That is the order in which an engine attaches. The first fault ends the walk where it explains the
next ones.
"""

import os
import pwd
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvray import __version__
from kvray.cli.doctor.finding import Finding, fault, hint, ok, skipped
from kvray.config import KVRayConfig, format_size
from kvray.errors import CapacityError, KVRayError, ShardUnavailable
from kvray.node.stage_calls import ShardSocket
from kvray.store import Arena, ArenaSpec
from kvray.store.arena.file import ARENA_FILE
from kvray.store.machine import lockers
from kvray.store.machine.access import Access
from kvray.store.machine.capacity import mount_of, read_mount, remount_command
from kvray.store.machine.side_file import ARENA_BYTE

_MEMORY = ("tmpfs", "hugetlbfs", "ramfs")
_ANSWER_S = 2.0
_LOCK_WAIT_S = 0.5
_CLOCKS_APART_S = 1.0
_COPY_BYTES = 256 * 2**20
_ROUNDS = 3


def arena_findings(config: KVRayConfig) -> Iterator[Finding]:
    """Yield what keeps a process of this user and container from its node's shard.

    It joins the arena for a moment, as an engine does, and reads some of its memory.
    """
    yield (mount := _mount(config))
    if mount.verdict == "fault":
        return
    yield (directory := _directory(config))
    if directory.verdict == "fault":
        return
    try:
        arena = Arena(config.node_dir, lock_wait_s=_LOCK_WAIT_S)
    except ShardUnavailable as error:
        yield _no_arena(config.node_dir, error)
        return
    with closing(arena):
        capacity = int(arena.tables.header["capacity"])
        age_s = max(0.0, time.time() - float(arena.tables.header["created"]))
        size = f"{format_size(capacity)} of blocks, made {age_s / 3600:.1f} h ago"
        yield ok("arena", f"{arena.arena_id}, {size}")
        yield _joined(arena)
        yield from _socket(config.node_dir, arena.arena_id)
        yield _copies(arena)


def why_not_here(
    shards: Sequence[Mapping[str, Any]], node_id: str, directory: Path
) -> Finding | None:
    """Return why this node has no arena in `directory`; None if it should have one.

    `shards` are those of `Client.status`; `node_id` is Ray's.
    """
    own = [shard for shard in shards if str(shard["shard"]).endswith(node_id[:12])]
    if not own:
        return skipped("arena", "this node has no shard; see shard.resource and shard.label")
    theirs = own[0].get("directory")
    if theirs is None or theirs == str(directory):
        return None
    return hint(
        "arena",
        f"this node's shard has its arena in {theirs}, but the configuration here says {directory}",
        "give the engines of this node the arena.dir and cluster_name that its Ray has",
    )


def _mount(config: KVRayConfig) -> Finding:
    where = config.arena.dir
    if not where.is_dir():
        return fault(
            "mount",
            f"arena.dir {where} is no directory here",
            "mount the memory volume of the node's shard at this path into this container, or"
            " correct arena.dir",
        )
    found = mount_of(where)
    kind = "unknown" if found is None else found.kind
    if kind not in _MEMORY:
        return hint(
            "mount",
            f"arena.dir {where} is on {kind}, which is no memory",
            "set arena.dir to a tmpfs, such as /dev/shm, or to a hugetlbfs mount",
        )
    room = read_mount(where)
    if room is None:
        return ok("mount", f"{where} is {kind} without a limit of its own")
    needed = ArenaSpec.of(config).geometry().file_bytes + config.events_bytes
    # As if it were empty: the arena itself may fill it, under another name.
    if needed > room.size and not _may_have_arena(config.node_dir):
        command = remount_command(replace(room, free=room.size), needed)
        return fault(
            "mount",
            f"arena.dir {where} has {format_size(room.size)}, but an arena of"
            f" {format_size(config.arena.capacity)} takes {format_size(needed)}",
            f"lower arena.capacity, or `{command}` (in a container: a larger"
            " --shm-size or emptyDir)",
        )
    return ok(
        "mount",
        f"{where} is {kind} of {format_size(room.size)}, {format_size(room.free)} free",
    )


def _may_have_arena(directory: Path) -> bool:
    """Return whether there is an arena already, as far as this user can see."""
    try:
        return (directory / ARENA_FILE).exists()
    except PermissionError:
        return True  # the next check reports it


def _directory(config: KVRayConfig) -> Finding:
    directory = config.node_dir
    try:
        found = directory.stat()
    except FileNotFoundError:
        return _no_directory(config)
    except PermissionError:
        return fault(
            "user",
            f"{config.arena.dir} cannot be searched by {_user(os.geteuid())}",
            "let this user search arena.dir, or run it as the user of the tier",
        )
    if not stat.S_ISDIR(found.st_mode):
        return fault("arena", f"{directory} is no directory", "remove it, then run `kvray up`")
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        return fault(
            "user",
            f"{directory} belongs to {_user(found.st_uid)} with mode"
            f" {stat.S_IMODE(found.st_mode):04o}, but this is {_user(os.geteuid())}",
            "run engine and Ray as one user (in Kubernetes with one runAsUser), or set"
            " arena.group to a group of both",
        )
    try:
        # The check of an engine, which binds root too.
        Access.of(config.arena.group).check_trust(directory)
    except KVRayError as error:
        says, _, fix = str(error).rstrip(".").partition("; ")
        return fault("user", says, fix)
    return ok("user", f"{_user(os.geteuid())} may use {directory}")


def _no_directory(config: KVRayConfig) -> Finding:
    others = sorted(
        path.name.removeprefix("kvray-")
        for path in config.arena.dir.glob("kvray-*")
        if path.is_dir() and (path / ARENA_FILE).exists()
    )
    says = f"arena.dir {config.arena.dir} has no tier named {config.cluster_name!r}"
    if others:
        return fault(
            "arena",
            f"{says}, but {', '.join(map(repr, others[:5]))}",
            f"set cluster_name, or KVRAY_CLUSTER_NAME, to {others[0]!r}, or start the missing"
            " tier with `kvray up`",
        )
    return fault(
        "arena",
        says,
        "start it with `kvray up`. If its shard serves on this node (`kvray status`), this"
        " container does not see the shard's memory: mount the same volume at arena.dir",
    )


def _no_arena(directory: Path, error: ShardUnavailable) -> Finding:
    path = directory / ARENA_FILE
    if not os.path.lexists(path):
        return fault(
            "arena",
            f"{directory} has no arena, because its shard still prepares it or has died",
            "wait until `kvray status` says serving; if it does not, run `kvray up`",
        )
    if not os.access(path, os.R_OK | os.W_OK, effective_ids=True):
        owner = _user(path.lstat().st_uid)
        return fault(
            "user",
            f"{path} belongs to {owner}, and {_user(os.geteuid())} cannot open it",
            "run engine and Ray as one user, and mount the volume read-write",
        )
    return fault(
        "arena",
        str(error).rstrip("."),
        f"install the same version of kvray here and in Ray (this is {__version__}); if it is"
        " the same, run `kvray down`, then `kvray up`",
    )


def _joined(arena: Arena) -> Finding:
    try:
        arena.join("kvray doctor")
    except CapacityError:
        return fault(
            "holders",
            f"living processes have all {len(arena.tables.holder_generation)} places of the arena",
            "raise arena.holders_max, then `kvray down` and `kvray up`; `kvray sweep --dry-run`"
            " names the processes",
        )
    except ShardUnavailable as error:
        pids = arena.side_file.lockers().get(ARENA_BYTE, set())
        who = ", ".join(
            f"process {pid} ({lockers.name_of(pid)}, state {lockers.state_of(pid)})" for pid in pids
        )
        return fault(
            "lock",
            str(error).rstrip(".") + (f"; {who} has the lock" if who else ""),
            "find its process with `kvray sweep --dry-run` and `lslocks`; it may be stopped in the"
            " middle of a change, or be in a container with another /proc",
        )
    return ok("lock", "can be taken, as an engine takes it")


def _socket(directory: Path, arena_id: str) -> Iterator[Finding]:
    shard = ShardSocket(directory)
    try:
        began = time.monotonic()
        answer = shard.call("hello", timeout_s=_ANSWER_S)
        ended = time.monotonic()
    except KVRayError as error:
        yield fault(
            "socket",
            str(error).split(";")[0].rstrip("."),
            "look at the shard with `kvray status`; meanwhile engines use what is in the arena, get"
            " no blocks from elsewhere, and are not counted",
        )
        return
    finally:
        shard.close()
    if (theirs := answer.get("arena_id")) != arena_id:
        yield fault(
            "socket",
            f"the shard behind the socket owns arena {theirs}, but the file that is mapped here is"
            f" {arena_id}",
            "mount one directory for both; if the tier has just restarted, look again",
        )
    else:
        took_ms = 1e3 * (ended - began)
        yield ok("socket", f"{answer.get('shard')} answered in {took_ms:.1f} ms")
    if (version := answer.get("version")) != __version__:
        yield hint(
            "versions",
            f"kvray is {__version__} here and {version or 'older'} in the shard",
            "install the same version in the engine's image and in Ray's",
        )
    else:
        yield ok("versions", f"kvray {__version__}, here and in the shard")
    yield _same_clock(answer, began, ended)


def _same_clock(answer: dict[str, Any], began: float, ended: float) -> Finding:
    """Compare the clocks: leases have monotonic times, which a time namespace may shift."""
    theirs = answer.get("monotonic_s")
    if not isinstance(theirs, float):
        return skipped("clock", "the shard does not tell its time")
    apart = max(began - theirs, theirs - ended, 0.0)
    if apart > _CLOCKS_APART_S:
        return fault(
            "clock",
            f"the monotonic clock here and the shard's are {apart:.0f} s apart",
            "run engine and Ray in one time namespace",
        )
    return ok("clock", "the shard has the same time")


def _copies(arena: Arena) -> Finding:
    """Copy a piece of the arena to private memory, as a load to a pool on the host does."""
    source = arena.tables.data[:_COPY_BYTES]
    target = np.zeros_like(source)
    rates = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        np.copyto(target, source)
        rates.append(len(source) / max(1e-9, time.perf_counter() - began))
    return ok("copy rate", f"{format_size(max(rates))}/s from the arena to this process's memory")


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return f"user {uid}"
