"""The engine's own HTTP server, as a child of the Serve replica: its command line and its life."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import yaml

from kvray.errors import ConfigError, KVRayError
from kvray.reference.child_process import last_words
from kvray.reference.engine_options import KvConnectorConfig
from kvray.serve.settings import Settings
from kvray.vllm import CONNECTOR

HOST = "127.0.0.1"
_REFERENCE_MODULE = "kvray.lab.openai_server"
_EVENTS_MAX = 100_000
"""KV events of an engine's pool that wait to be published; they are taken 20 times a second."""
_POLL_S = 0.2
_TERM_TIMEOUT_S = 15.0


def engine_of(settings: Settings) -> str:
    """Return which engine is served: what `auto` stands for on this node."""
    if settings.engine != "auto":
        return settings.engine
    installed = (one for one in ("tensorrt_llm", "vllm") if importlib.util.find_spec(one))
    return next(installed, "reference")


def command_of(settings: Settings, port: int, directory: Path) -> list[str]:
    """Return the command that starts the engine's server on a port of this node.

    The engine's options have the connector among them. TensorRT-LLM reads them from a file, which
    is written into `directory`.

    Raises:
        ConfigError: the settings' own command has a field that is none.
    """
    model, options, path = settings.model, settings.options(), directory / "options.yaml"
    at = ["--host", HOST, "--port", str(port)]
    events = {"event_buffer_max_size": _EVENTS_MAX} if settings.pool_events else {}
    match engine_of(settings):
        case "vllm":
            options = {"kv_transfer_config": CONNECTOR, **options}
            name = ["--served-model-name", settings.served_name]
            line = ["vllm", "serve", model, *at, *name, *_flags(options)]
        case "reference":
            named = {"model": model, "served_name": settings.served_name, "connector": True}
            options = {**events, **options, **named}
            line = [sys.executable, "-m", _REFERENCE_MODULE, *at, "--options", json.dumps(options)]
        case _:
            pool = {"enable_partial_reuse": False, **(options.get("kv_cache_config") or {})}
            options["kv_cache_config"] = {**events, **pool, "enable_block_reuse": True}
            options["kv_connector_config"] = asdict(KvConnectorConfig())
            line = ["trtllm-serve", model, *at, "--extra_llm_api_options", str(path)]
    path.write_text(yaml.safe_dump(options))
    if settings.command is None:
        return [*line, *settings.server_args]
    fields = {"model": model, "host": HOST, "port": port, "options": path}
    try:
        return [word.format(**fields) for word in settings.command]
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"command has a field that is none ({error!r}); there are"
            f" {', '.join('{' + name + '}' for name in fields)}."
        ) from None


def _flags(options: Mapping[str, Any]) -> list[str]:
    """Return options as flags of a command line: `max_model_len: 8` as `--max-model-len 8`."""
    flags = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return flags


class EngineServer:
    """A server process on a free port of this node; it never outlives this process."""

    def __init__(
        self, name: str, settings: Settings, *, env: Mapping[str, str], log: Path | None
    ) -> None:
        """Begin to start it; `wait_ready` ends that.

        Args:
            name: appears in errors.
            settings: what it loads, and how.
            env: variables of the process besides those of this one.
            log: receives its output; None: a file that has no name.
        """
        self.name = name
        with socket.create_server((HOST, 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://{HOST}:{self.port}"
        with ExitStack() as opened:
            # Its keeper removes the directory, too, if this process is killed.
            made = TemporaryDirectory(prefix="kvray-serve-", ignore_cleanup_errors=True)
            directory = opened.enter_context(made)
            self._log = opened.enter_context(log.open("a+b") if log else TemporaryFile())  # noqa: SIM115
            command = command_of(settings, self.port, Path(directory))
            # What keeps the server, which is its child.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvray.serve.keeper", directory, *command],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
            )
            self._opened = opened.pop_all()

    def wait_ready(self, timeout_s: float) -> None:
        """Return when the server says that it is well.

        Raises:
            KVRayError: it ended, or time is up; with the end of its log.
        """
        deadline = time.monotonic() + timeout_s
        while not self.is_well(timeout_s=5.0):
            has_ended = self.process.poll() is not None
            if has_ended or time.monotonic() > deadline:
                what = "has ended" if has_ended else f"was not ready within {timeout_s:.0f} s"
                said = last_words(self._log)
                raise KVRayError(f"The engine {self.name} {what}. {said}".strip())
            time.sleep(_POLL_S)

    def is_well(self, *, timeout_s: float) -> bool:
        """Ask the server's `/health`."""
        with closing(HTTPConnection(HOST, self.port, timeout=timeout_s)) as asked:
            try:
                asked.request("GET", "/health")
                return asked.getresponse().status == 200
            except (OSError, HTTPException):
                return False

    def close(self) -> None:
        """End the server and all that it has started. Twice is fine."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(_TERM_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._opened.close()


def log_path(name: str) -> Path | None:
    """Return where the server writes its log: beside this process's own, where Ray's dashboard is.

    None, a file that has no name, where this process does not write to a file.
    """
    own = Path(os.readlink("/proc/self/fd/2"))
    return own.with_name(f"{name}.log") if own.is_file() else None
