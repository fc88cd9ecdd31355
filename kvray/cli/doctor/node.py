"""Checks this machine or container, and whether a process here can use its node's arena.

The arena's checks go in the order in which an engine attaches: mount, user, file, lock, socket,
clock. The first fault ends the walk where it explains the next ones.
"""

import contextlib
import os
import platform
import pwd
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from kvray import __version__
from kvray.cli.doctor.tier import Finding, fault, hint, ok, skipped
from kvray.config import KVRayConfig, format_size
from kvray.errors import CapacityError, ConfigError, KVRayError, ShardUnavailable
from kvray.identity.tenant import read_secret
from kvray.node.stage_calls import ShardSocket
from kvray.store import Arena, ArenaSpec
from kvray.store.arena.file import ARENA_FILE
from kvray.store.machine import lockers
from kvray.store.machine.access import Access
from kvray.store.machine.capacity import limiting_cgroups, mount_of, read_mount, remount_command
from kvray.store.machine.side_file import ARENA_BYTE
from kvray.transport.nixl import has_rdma

_PACKAGES = ("ray", "torch", "msgpack", "numpy", "xxhash", "nixl", "tensorrt_llm")
_FILES_MIN = 4096
_DEVICES = ("infiniband", "net")
_PROBE_S = 60.0
_NIXL_PROBE = """
import numpy as np
from kvray.transport.nixl import NixlTransport
import os
end = NixlTransport(np.zeros(1 << 20, dtype=np.uint8))
print(end.status()["library"], os.environ.get("UCX_TLS", "any"))
end.close()
"""
_CONNECTOR_PROBE = """
import sys
import kvray.connector
assert "ray" not in sys.modules, "it brings Ray into engines"
"""


def machine_findings(config: KVRayConfig) -> Iterator[Finding]:
    """Yield the findings about this machine or container."""
    versions = [f"kvray {__version__}", f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    yield ok("software", ", ".join(versions))
    yield _connector()
    yield _open_files()
    yield _locked_memory(config)
    yield _memory_limit(config)
    yield from _secrets(config)
    yield _waiting(config)
    yield _nixl(config)
    rdma, network = (
        sorted(path.name for path in Path("/sys/class", one).glob("*")) for one in _DEVICES
    )
    cards = ", ".join(name for name in network if name != "lo") or "loopback only"
    yield ok("devices", f"RDMA on {', '.join(rdma)}" if rdma else f"no RDMA; TCP over {cards}")


def _connector() -> Finding:
    """Import the connector in another process, as an engine does: it must not import Ray."""
    if find_spec("torch") is None:
        return skipped("connector", "there is no torch here, so no engine runs in this environment")
    status, said = _probe(_CONNECTOR_PROBE)
    if status != 0:
        return fault(
            "connector",
            f"kvray.connector cannot be imported: {said}",
            "install kvray where the engine runs: `pip install 'kvray[engine]'`",
        )
    return ok("connector", "kvray.connector can be imported, without Ray")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _FILES_MIN:
        return hint(
            "open files",
            f"a process may open {soft} files",
            f"raise it: `ulimit -n 65536` (its hard limit is {_limit(hard)}), in a container"
            " `--ulimit nofile=65536`",
        )
    return ok("open files", f"a process may open {_limit(soft)}")


def _locked_memory(config: KVRayConfig) -> Finding:
    """Compare the limit with the arena, all of which RDMA locks."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    allowed = "any amount of" if soft == resource.RLIM_INFINITY else format_size(soft)
    is_short = soft != resource.RLIM_INFINITY and soft < config.arena.capacity
    if is_short and has_rdma():
        return fault(
            "locked memory",
            f"a process may lock {allowed} memory, but RDMA locks the arena's"
            f" {format_size(config.arena.capacity)}",
            "start Ray with `ulimit -l unlimited`, in a container with `--ulimit memlock=-1`",
        )
    return ok("locked memory", f"a process may lock {allowed} memory")


def _memory_limit(config: KVRayConfig) -> Finding:
    """Compare the limit with the arena: a tmpfs counts for the cgroup that touches it first."""
    found = min(limiting_cgroups(), key=lambda cgroup: cgroup.limit, default=None)
    if found is None:
        return ok("cgroup", "no limit on memory")
    says = f"{found.path} allows {format_size(found.limit)}, {format_size(found.left)} left"
    if (config.node_dir / ARENA_FILE).exists() or found.left >= config.arena.capacity:
        return ok("cgroup", says)
    return hint(
        "cgroup",
        f"{says}, but an arena made here would take {format_size(config.arena.capacity)}",
        "raise the container's memory limit by arena.capacity where the shard runs, or lower"
        " arena.capacity",
    )


def _secrets(config: KVRayConfig) -> Iterator[Finding]:
    """Yield whether this user can read the configuration's secrets."""
    for name in ("auth_token_file", "tenant_secret_file"):
        path = getattr(config.security, name)
        if path is None:
            continue
        try:
            read_secret(path, setting=f"security.{name}")
        except ConfigError as error:
            says, _, fix = str(error).rstrip(".").rpartition("; ")
            yield fault("secret", says.rstrip("."), fix)
        else:
            yield ok("secret", f"this user can read the file of security.{name}, and others cannot")


def _waiting(config: KVRayConfig) -> Finding:
    if wait_s := config.connector.stage_wait_s:
        says = f"engines wait {1000 * wait_s:g} ms for blocks of other nodes and of the disk"
        return ok("waiting", says)
    return hint(
        "waiting",
        "connector.stage_wait_s is 0: engines get no blocks of other nodes or of the disk by"
        " themselves, and count them as not_stored",
        "raise it, unless the router calls Client.prefetch",
    )


def _nixl(config: KVRayConfig) -> Finding:
    """Make real agents, in another process: the library may abort or hang."""
    if "nixl" not in config.staging.transports:
        return skipped("NIXL", "staging.transports does not name it")
    status, said = _probe(_NIXL_PROBE)
    if status != 0:
        says = f"blocks of other nodes come through Ray's object store: {said.rstrip('.')}"
        if status is not None and status > 0:  # a sentence of ours
            return hint("NIXL", says, "mend that where Ray runs; engines do not need NIXL")
        return hint(
            "NIXL",
            says,
            "install another version of NIXL's wheel where Ray runs; until then set"
            " staging.transports: [object_ref], because movers may end like this process",
        )
    library, wires = said.split()[-2:]
    return ok("NIXL", f"{library} makes agents, over {wires}")


def _probe(code: str) -> tuple[int | None, str]:
    """Run `code` in another interpreter; return its status, None if it hung, and what it said."""
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {_PROBE_S:.0f} s"
    status, lines = done.returncode, done.stderr.strip().splitlines()
    if status < 0:
        return status, f"a process that used it ended by {signal.Signals(-status).name}"
    failed = lines[-1] if lines else f"it ended with status {status}"
    return status, failed if status else done.stdout


def _limit(value: int) -> str:
    return "any number of files" if value == resource.RLIM_INFINITY else f"{value} files"


_ANSWER_S = 15.0
_LOCK_WAIT_S = 5.0
"""Engines wait for less. A busy node is no fault, and how long an answer took is shown."""
_CLOCKS_APART_S = 1.0
_COPY_BYTES = 256 * 2**20
_ROUNDS = 3


def arena_findings(config: KVRayConfig) -> Iterator[Finding]:
    """Yield what keeps a process from its node's shard; it joins the arena, as an engine does."""
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
    with contextlib.closing(arena):
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
    """Return why the node of that id in Ray has no arena in `directory`; None if it should."""
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
    if found is None or not found.is_memory:
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
    try:
        has_arena = (config.node_dir / ARENA_FILE).exists()
    except PermissionError:
        has_arena = True  # the next check reports it
    if needed > room.size and not has_arena:
        command = remount_command(replace(room, free=room.size), needed)
        return fault(
            "mount",
            f"arena.dir {where} has {format_size(room.size)}, but an arena of"
            f" {format_size(config.arena.capacity)} takes {format_size(needed)}",
            f"lower arena.capacity, or `{command}` (in a container: a larger"
            " --shm-size or emptyDir)",
        )
    return ok(
        "mount", f"{where} is {kind} of {format_size(room.size)}, {format_size(room.free)} free"
    )


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
    took_ms = 1e3 * (ended - began)
    if (theirs := answer.get("arena_id")) == arena_id:
        yield ok("socket", f"{answer.get('shard')} answered in {took_ms:.1f} ms")
    else:
        yield fault(
            "socket",
            f"the shard behind the socket owns arena {theirs}, but the file that is mapped here is"
            f" {arena_id}",
            "mount one directory for both; if the tier has just restarted, look again",
        )
    if (version := answer.get("version")) != __version__:
        yield hint(
            "versions",
            f"kvray is {__version__} here and {version or 'older'} in the shard",
            "install the same version in the engine's image and in Ray's",
        )
    else:
        yield ok("versions", f"kvray {__version__}, here and in the shard")
    # Leases have monotonic times, which a time namespace may shift.
    clock = answer.get("monotonic_s")
    if not isinstance(clock, float):
        yield skipped("clock", "the shard does not tell its time")
    elif (apart := max(began - clock, clock - ended, 0.0)) > _CLOCKS_APART_S:
        says = f"the monotonic clock here and the shard's are {apart:.0f} s apart"
        yield fault("clock", says, "run engine and Ray in one time namespace")
    else:
        yield ok("clock", "the shard has the same time")
    niceness, own = answer.get("niceness", 0), os.getpriority(os.PRIO_PROCESS, 0)
    if niceness > own:
        yield hint(
            "priority",
            f"the shard has niceness {niceness} and this process {own}: where all cores are busy,"
            " engines that are started like this one come first",
            "start Ray with RAY_worker_niceness=0 on this node, or with the right to do better"
            " (CAP_SYS_NICE)",
        )


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
