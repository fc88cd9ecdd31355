"""Where `kvray bench connector` happens: an arena of its own, and a configuration that finds it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import yaml

from kvray import node
from kvray.cli.bench.stage import make_directory
from kvray.cli.interrupts import Interrupts
from kvray.config import KVRayConfig, environ_for
from kvray.errors import KVRayError
from kvray.node import NodeLink
from kvray.store import Arena, ArenaOwner, ArenaSpec

_CLUSTER = "bench"
_SLAB_BYTES = 64 * 2**20
_HOLDERS_MAX = 16
_NEIGHBOUR = "kvray.cli.bench.connector_neighbour"


class ConnectorStage:
    """An arena without a shard, in a directory that ends with the stack that was given."""

    def __init__(
        self,
        settings: KVRayConfig,
        *,
        capacity: int,
        block_bytes: int,
        stack: ExitStack,
        interrupts: Interrupts,
    ) -> None:
        """Make the arena, and lead all connectors of this process to it.

        Args:
            settings: what the user has configured; all of it holds but for where the tier is.
            capacity: bytes of the arena.
            block_bytes: bytes of one rank's part of a block.
            stack: ends what was begun.
            interrupts: held back while it begins.

        Raises:
            CapacityError: the arena does not fit into the memory.
            ConfigError: no directory can be made in `arena.dir`.
        """
        self.block_bytes = block_bytes
        self._settings = settings
        with interrupts.held():
            self.directory = make_directory(settings.arena.dir)
            stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
            stack.enter_context(_environment(self.config_path(verify=False)))
        self.node_dir = self.directory / f"kvray-{_CLUSTER}"
        self.node_dir.mkdir()
        spec = ArenaSpec(
            cluster_name=_CLUSTER,
            capacity=capacity,
            slab=_SLAB_BYTES,
            slot_min=block_bytes,
            holders_max=_HOLDERS_MAX,
        )
        with interrupts.held():
            arena = Arena.create(self.node_dir, spec, lock_wait_s=1.0)
            stack.callback(arena.close)
            self._owner = ArenaOwner(arena)
            stack.callback(self._owner.retire)

    def config_path(self, *, verify: bool) -> Path:
        """Return a configuration file that leads to this stage.

        Args:
            verify: whether blocks are checked before they are promised.
        """
        mode = "always" if verify else "never"
        values = self._settings.model_dump(mode="json")
        values["cluster_name"] = _CLUSTER
        values["arena"]["dir"] = str(self.directory)
        values["connector"] |= {"model_key": "bench", "load": "sync", "verify_on_load": mode}
        path = self.directory / f"verify-{mode}.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    def attach(self) -> NodeLink:
        """Return the link that the connectors of this process share; `detach` gives it back."""
        return node.attach(
            self.node_dir,
            label="bench",
            lock_wait_s=self._settings.arena.lock_wait_s,
            attach_retry_s=self._settings.connector.attach_retry_s,
        )

    def clear(self) -> None:
        """Evict every block."""
        self._owner.clear()

    @contextmanager
    def neighbour(self) -> Iterator[None]:
        """Have another process of the node store, lease and release all the time meanwhile."""
        process = subprocess.Popen(
            [sys.executable, "-m", _NEIGHBOUR, str(self.node_dir), str(self.block_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for this process, which ends it
        )
        assert process.stdin is not None, "it was asked for"
        assert process.stdout is not None, "it was asked for"
        with process:
            try:
                if not process.stdout.readline():
                    raise KVRayError("The other process of the bench did not start; run it again.")
                yield
            finally:
                process.stdin.close()  # which ends it


@contextmanager
def _environment(path: Path) -> Iterator[None]:
    """Have every configuration that is loaded be that of `path`, without overrides."""
    before = dict(os.environ)
    os.environ.update(environ_for(path))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
