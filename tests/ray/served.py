"""kvray.serve as a user has it: `serve run` on a cluster with a tier, and the `openai` client."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from kvray import Client
from kvray.actors.ray_glue.calls import list_actors, tier_named
from kvray.actors.tier.local_ray import LocalRay
from kvray.config import KVRayConfig, load_config
from tests.ray.command_line import ROOT, Shell, open_shell
from tests.waiting import wait_for

openai = pytest.importorskip("openai")

EXAMPLE = ROOT / "examples" / "ray_serve"
CHILD = "kvray.reference.replica_child"
DEADLINE_S = 300.0
QUESTION = [
    {"role": "system", "content": "You keep the ledger of a library with three rooms. " * 4},
    {"role": "user", "content": "What is the third room for?"},
]
_SERVE = str(Path(sys.executable).parent / "serve")
_END_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The application, up."""

    shell: Shell
    config: KVRayConfig
    environ: dict[str, str]
    settings: Path
    serve: "subprocess.Popen[bytes]"
    client: Any

    def ask(self, **options: Any) -> Any:
        """Ask for a chat's answer."""
        return ask(self.client, **options)

    def ask_by_name(self, **options: Any) -> tuple[str, Any]:
        """Return the replica that answered, and a chat's answer."""
        raw = ask(self.client.with_raw_response, **options)
        return raw.headers["x-kvray-replica"], raw.parse()

    def shards(self) -> list[dict[str, Any]]:
        """Return what the tier says of its shards."""
        return list(Client(self.config).status()["shards"])

    def connected(self) -> list[str]:
        """Return the replicas that are registered and alive, as the tier says."""
        replicas = [one for shard in self.shards() for one in shard["replicas"]]
        return sorted(one["replica"] for one in replicas if one["connected"])

    def stored(self) -> int:
        """Return how many blocks were stored, ever."""
        return sum(shard["arena"]["stored"] for shard in self.shards())

    def engines(self) -> list[psutil.Process]:
        """Return the engines' processes, also those whose parent is gone."""
        return engines_of(self.environ["KVRAY_CONFIG"])

    def engines_by_name(self, number: int) -> dict[str, psutil.Process]:
        """Return the engines by their names in kvray, once there are so many and all are well."""
        found: dict[str, psutil.Process] = {}

        def are_all() -> bool:
            found.clear()
            found.update({name_of(engine): engine for engine in self.engines()})
            return len(found) == number and sorted(found) == self.connected()

        wait_for(are_all, f"{number} engines")
        return found

    def replicas_by_name(self, number: int) -> dict[str, psutil.Process]:
        """Return the Serve replicas by the names of their engines, likewise."""
        return {
            name: psutil.Process(engine.ppid())
            for name, engine in self.engines_by_name(number).items()
        }

    def deploy(self, **changes: Any) -> None:
        """Deploy the application again, with changes as for `write_settings`.

        Other arguments make it a new version, of which no engine stays.
        """
        settings = yaml.safe_load(self.settings.read_text())
        _change(*settings["applications"], **changes)
        self.settings.write_text(yaml.safe_dump(settings))
        done = subprocess.run(
            [_SERVE, "run", "--non-blocking", str(self.settings)],
            cwd=ROOT,
            env={**self.shell.environ, **self.environ},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def ask(client: Any, **options: Any) -> Any:
    """Ask for a chat's answer."""
    asked = {"model": "tiny", "messages": QUESTION, "max_tokens": 24, **options}
    return client.chat.completions.create(**asked)


@contextlib.contextmanager
def open_served(local: LocalRay, name: str, **args: Any) -> Iterator[Served]:
    """Have a tier and the example's application with `args` for the time of a block."""
    with open_shell(name) as shell:
        config = shell.directory / "kvray.yaml"
        config.write_text(
            yaml.safe_dump(
                {
                    "cluster_name": shell.cluster_name,
                    "arena": {"capacity": "64MiB", "slab": "16MiB", "lock_wait_s": 0.05},
                    "connector": {"model_key": "tiny"},
                    "shard": {"heartbeat_s": 0.1},
                    "ray": {"address": local.address},
                }
            )
        )
        environ = {**local.environ(), "KVRAY_CONFIG": str(config)}
        up = shell.run("up", **environ)
        assert up.returncode == 0, up.stderr
        settings = shell.directory / "serve.yaml"
        port = write_settings(settings, kvray_config=str(config), **args)
        try:
            with (
                serve_run(settings, port, {**shell.environ, **environ}) as serve,
                open_client(port) as client,
            ):
                yield Served(
                    shell=shell,
                    config=load_config(config, environ={}),
                    environ=environ,
                    settings=settings,
                    serve=serve,
                    client=client,
                )
        finally:
            down = shell.run("down", **environ)
        assert down.returncode == 0, down.stderr
        with tier_named(shell.cluster_name):
            assert list_actors() == []


def write_settings(path: Path, **changes: Any) -> int:
    """Write the example's own serve.yaml for the tiny model; return the port that it names.

    `changes` are other arguments of the application, None to leave one out; `num_blocks`, of an
    engine's pool; and `engine`, options of Serve's deployment of the engines.
    """
    settings = yaml.safe_load((EXAMPLE / "serve.yaml").read_text())
    (application,) = settings["applications"]
    settings["http_options"]["port"] = port = _free_port()
    application["args"].update(engine="reference", model="tiny")
    _change(application, **{"num_blocks": 128, **changes})
    path.write_text(yaml.safe_dump(settings))
    return port


def _change(
    application: dict[str, Any],
    *,
    num_blocks: int | None = None,
    engine: Mapping[str, Any] | None = None,
    **args: Any,
) -> None:
    if num_blocks is not None:
        application["args"]["engine_options"].update(num_blocks=num_blocks)
    if engine is not None:
        application["deployments"] = [{"name": "Engine", **engine}]
    new = {**application["args"], **args}
    application["args"] = {name: one for name, one in new.items() if one is not None}


@contextlib.contextmanager
def serve_run(
    settings: Path, port: int, environ: Mapping[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    """Have `serve run` for the time of a block, from when its endpoint answers."""
    log = settings.with_suffix(".log")
    with log.open("wb") as output:
        serve = subprocess.Popen(
            [_SERVE, "run", str(settings)],
            cwd=ROOT,
            env=dict(environ),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for(lambda: serve.poll() is not None or _answers(port), log)
        assert serve.poll() is None, log.read_text()
        yield serve
    finally:
        end(serve)


def open_client(port: int) -> Any:
    """Return a client of that endpoint, which tries nothing twice."""
    url = f"http://127.0.0.1:{port}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)


def end(serve: "subprocess.Popen[bytes]") -> None:
    """End Serve as Ctrl-C does; the second time it is gone."""
    if serve.poll() is None:
        serve.send_signal(signal.SIGINT)
        try:
            serve.wait(_END_S)
        finally:
            serve.kill()
            serve.wait()


def engines_of(config: str) -> list[psutil.Process]:
    """Return the engines' processes that were told of that kvray.yaml."""
    marker = f"KVRAY_CONFIG={config}\0".encode()
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if CHILD in process.cmdline():
                found += [process] if marker in _environ(process) else []
    return found


def name_of(engine: psutil.Process) -> str:
    """Return the name of an engine in kvray; empty when it has ended."""
    with contextlib.suppress(psutil.Error, OSError):
        _, _, rest = _environ(engine).partition(b"KVRAY_CONNECTOR__REPLICA=")
        return os.fsdecode(rest.partition(b"\0")[0])
    return ""


def _environ(process: psutil.Process) -> bytes:
    return Path(f"/proc/{process.pid}/environ").read_bytes()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5):
            return True
    except OSError:
        return False
