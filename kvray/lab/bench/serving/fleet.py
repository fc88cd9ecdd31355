"""The endpoints of `kvray bench serve --local`: a tier, and three applications of kvray.serve."""

from __future__ import annotations

import contextlib
import io
import logging
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kvray.config import KVRayConfig
from kvray.errors import ConfigError, KVRayError
from kvray.lab.bench.runner import Runner, parse_option
from kvray.lab.bench.serving.load import Endpoint
from kvray.lab.bench.tier import own_settings, start_tier

if TYPE_CHECKING:
    from ray.serve import Application

    MakeApp = Callable[[dict[str, Any]], Application]

_POLL_S = 0.5
_ROUTERS = {"kvray": "kvray", "serve": "serve", "no-tier": "serve"}
"""Application -> its router. The first two use the tier, under model keys of their own: what one
has stored is not the other's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What is started."""

    config: Path | None
    model: str
    num_replicas: int
    num_blocks: int
    """Of each engine's own pool."""
    capacity: str
    """Of the tier's arena."""
    start_timeout_s: float

    def start(self, runner: Runner, app: MakeApp) -> list[Endpoint]:
        """Start Ray, the tier and the applications, which end with the run.

        Raises:
            KVRayError: something did not start in time.
        """
        runner.show("Starting a tier")
        # Ray prints words about its workers, which are no part of the report.
        runner.stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        capacity = parse_option("--capacity", self.capacity)
        settings = own_settings(self.config, capacity=capacity)
        launch = start_tier(runner, settings)
        assert launch.local is not None, "the tier is on a Ray of its own"
        directory = runner.make_directory(Path(tempfile.gettempdir()))
        from ray import serve

        port = _free_port()
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        with runner.interrupts.held():
            runner.stack.callback(serve.shutdown)
            serve.start(http_options={"host": "127.0.0.1", "port": port})
        for name in _ROUTERS:
            runner.show(f"Starting {name}")
            path = self._write_config(settings, directory, name, launch.local.address)
            target = serve.RunTarget(app(self._arguments(name, path)), name, f"/{name}")
            serve.run_many([target], wait_for_applications_running=False)
            self._wait(runner, serve.status, name)
        return [
            Endpoint(name=name, url=f"http://127.0.0.1:{port}/{name}", model=self.model)
            for name in _ROUTERS
        ]

    def _arguments(self, name: str, config: Path) -> dict[str, Any]:
        """Return the arguments of an application."""
        options = {"num_blocks": self.num_blocks, "num_threads": 1}
        nothing_to_fetch = {"prefetch_timeout_s": 0} if name == "no-tier" else {}
        return {
            **nothing_to_fetch,
            "engine": "reference",
            "model": self.model,
            "num_replicas": self.num_replicas,
            "router": _ROUTERS[name],
            "kvray_config": str(config),
            "engine_options": options,
            "pool_blocks": self.num_blocks,
        }

    def _write_config(
        self, settings: KVRayConfig, directory: Path, name: str, address: str
    ) -> Path:
        """Write the kvray.yaml of an application; that of `no-tier` names a tier that is not up."""
        cluster_name = settings.cluster_name + ("-none" if name == "no-tier" else "")
        made = {
            "cluster_name": cluster_name,
            "arena": {"dir": str(settings.arena.dir)},
            "connector": {"model_key": f"bench-{name}"},
            "ray": {"address": address},
        }
        path = directory / f"{name}.yaml"
        path.write_text(yaml.safe_dump(made))
        return path

    def _wait(self, runner: Runner, status: Callable[[], Any], name: str) -> None:
        """Wait until an application runs."""
        deadline = time.monotonic() + self.start_timeout_s
        while time.monotonic() < deadline:
            runner.interrupts.check()
            found = status().applications.get(name)
            if found is not None and found.status == "RUNNING":
                return
            if found is not None and found.status == "DEPLOY_FAILED":
                raise ConfigError(f"{name} did not start: {found.message}")
            time.sleep(_POLL_S)
        raise KVRayError(
            f"{name} did not start within {self.start_timeout_s:.0f} s; give fewer --replicas."
        )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
