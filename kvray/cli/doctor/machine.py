"""Checks this machine or container: software, limits, memory, network devices."""

import platform
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from kvray import __version__
from kvray.cli.doctor.finding import Finding, fault, hint, ok, skipped
from kvray.config import KVRayConfig, format_size
from kvray.errors import ConfigError
from kvray.identity.tenant import read_secret
from kvray.store.arena.file import ARENA_FILE
from kvray.store.machine.capacity import limiting_cgroups
from kvray.transport.nixl import has_rdma

_PACKAGES = ("ray", "torch", "msgpack", "numpy", "xxhash", "nixl", "tensorrt_llm")
_FILES_MIN = 4096
_INFINIBAND = Path("/sys/class/infiniband")
_NETWORK = Path("/sys/class/net")
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
print("ray" in sys.modules)
"""


def machine_findings(config: KVRayConfig) -> Iterator[Finding]:
    """Yield the findings about this machine or container."""
    yield _software()
    yield _connector()
    yield _open_files()
    yield _locked_memory(config)
    yield _memory_limit(config)
    yield from _secrets(config)
    yield _nixl(config)
    yield _devices()


def _software() -> Finding:
    versions = [f"kvray {__version__}", f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ok("software", ", ".join(versions))


def _connector() -> Finding:
    """Import the connector in another process, as an engine does: it must not import Ray."""
    answer = _probe(_CONNECTOR_PROBE)
    if answer is None or answer.returncode:
        return fault(
            "connector",
            f"kvray.connector cannot be imported: {_last_line(answer)}",
            "install kvray with its requirements where the engine runs: `pip install kvray`",
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
    limits = limiting_cgroups()
    if not limits:
        return ok("cgroup", "no limit on memory")
    tightest = min(limits, key=lambda cgroup: cgroup.limit)
    says = (
        f"{tightest.path} allows {format_size(tightest.limit)}, {format_size(tightest.left)} left"
    )
    if (config.node_dir / ARENA_FILE).exists() or tightest.left >= config.arena.capacity:
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


def _nixl(config: KVRayConfig) -> Finding:
    """Make real agents, in another process: the library may abort or hang."""
    if "nixl" not in config.staging.transports:
        return skipped("NIXL", "staging.transports does not name it")
    answer = _probe(_NIXL_PROBE)
    if answer is None or answer.returncode:
        says = f"blocks of other nodes come through Ray's object store: {_last_line(answer)}"
        if answer is not None and answer.returncode > 0:  # a sentence of ours, with its fix
            return hint("NIXL", says, "do so where Ray runs; engines do not need NIXL")
        return hint(
            "NIXL",
            says,
            "install another version of NIXL's wheel where Ray runs; until then set"
            " staging.transports: [object_ref], because movers may end like this process",
        )
    library, wires = answer.stdout.split()[-2:]
    return ok("NIXL", f"{library} makes agents, over {wires}")


def _devices() -> Finding:
    rdma, network = _names(_INFINIBAND), [name for name in _names(_NETWORK) if name != "lo"]
    if rdma:
        return ok("devices", f"RDMA on {', '.join(rdma)}")
    return ok("devices", f"no RDMA; TCP over {', '.join(network) or 'loopback only'}")


def _probe(code: str) -> "subprocess.CompletedProcess[str] | None":
    """Run `code` in another interpreter; None if it did not end in time."""
    try:
        return subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None


def _last_line(answer: "subprocess.CompletedProcess[str] | None") -> str:
    if answer is None:
        return f"no answer within {_PROBE_S:.0f} s"
    if answer.returncode < 0:
        return f"a process that used it ended by {signal.Signals(-answer.returncode).name}"
    lines = answer.stderr.strip().splitlines()
    return lines[-1] if lines else f"it ended with status {answer.returncode}"


def _names(directory: Path) -> list[str]:
    try:
        return sorted(path.name for path in directory.iterdir())
    except OSError:
        return []


def _limit(value: int) -> str:
    return "any number of files" if value == resource.RLIM_INFINITY else f"{value} files"
