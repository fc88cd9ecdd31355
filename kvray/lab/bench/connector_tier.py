"""The tier of `kvray bench connector`: an arena without a shard, and a configuration for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from kvray import node
from kvray.config import KVRayConfig, environ_for
from kvray.lab.bench.runner import Runner, bench_spec
from kvray.lab.bench.worker import Worker, call_all
from kvray.node import NodeLink
from kvray.store import ArenaOwner

_CLUSTER = "bench"


class ConnectorTier:
    """An arena without a shard, in a directory that ends with the run.

    It leads all connectors of this process to the arena.

    Raises:
        CapacityError: the arena does not fit into the memory.
        ConfigError: no directory can be made in `arena.dir`.
    """

    def __init__(
        self, settings: KVRayConfig, *, capacity: int, block_bytes: int, runner: Runner
    ) -> None:
        self.block_bytes = block_bytes
        self._settings = settings
        self._runner = runner
        self._directory = runner.make_directory(settings.arena.dir)
        # Every configuration that is loaded meanwhile is this one, without overrides.
        runner.stack.callback(os.environ.update, dict(os.environ))
        runner.stack.callback(os.environ.clear)
        os.environ.update(environ_for(self.config_path(verify=False)))
        self._node_dir = self._directory / f"kvray-{_CLUSTER}"
        self._node_dir.mkdir()
        spec = bench_spec(capacity, slot_min=block_bytes)
        self.clear = ArenaOwner(runner.make_arena(self._node_dir, spec)).clear

    def config_path(self, *, verify: bool) -> Path:
        """Return a configuration file that leads to this tier."""
        mode = "always" if verify else "never"
        values = self._settings.model_dump(mode="json")
        values["cluster_name"] = _CLUSTER
        values["arena"]["dir"] = str(self._directory)
        values["connector"] |= {"model_key": "bench", "load": "sync", "verify_on_load": mode}
        path = self._directory / f"verify-{mode}.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    def attach(self) -> NodeLink:
        """Return the link that the connectors of this process share; `detach` gives it back."""
        return node.attach(
            self._node_dir,
            label="bench",
            lock_wait_s=self._settings.arena.lock_wait_s,
            attach_retry_s=self._settings.connector.attach_retry_s,
        )

    @contextmanager
    def neighbour(self) -> Iterator[None]:
        """Run another process of the node that stores, leases and releases without a pause."""
        with self._runner.scope() as runner:
            worker = Worker.start(runner)
            call_all([worker], "attach", directory=str(self._node_dir))
            worker.send("churn", block_bytes=self.block_bytes)
            yield
            worker.send("detach")  # which ends the churning
            worker.receive()
            worker.receive()
