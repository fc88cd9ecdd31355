"""Runs commands as a user does: processes of their own, in a temporary directory of their own."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.forks import Done
from tests.waiting import HANG_S, wait_for

ROOT = Path(__file__).parents[3]
SHM = Path("/dev/shm")


def free_port() -> int:
    """Return the number of a port that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Shell:
    """A temporary directory, the name of a tier, and the environment of a user who has neither."""

    def __init__(self, directory: Path, cluster_name: str) -> None:
        self.directory = directory
        self.cluster_name = cluster_name
        self.node_dir = SHM / f"kvray-{cluster_name}"
        self.pid = 0  # of the command that was started last
        # The session's own Ray has left its address and token in this process's environment.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.environ = {
            **kept,
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "TMPDIR": str(directory),
            "KVRAY_CLUSTER_NAME": cluster_name,
            "KVRAY_ARENA__CAPACITY": "64MiB",
            "COLUMNS": "160",
        }

    def run(self, *args: str | Path, **environ: str) -> Done:
        """Run a command of kvray."""
        with self.start(*args, **environ) as process:
            stdout, stderr = process.communicate(timeout=HANG_S)
        return Done(process.args, process.returncode, stdout, stderr)

    def say(self, *args: str | Path, **environ: str) -> str:
        """Run a command that must succeed; return what it printed."""
        done = self.run(*args, **environ)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def shard(self, **environ: str) -> dict[str, Any]:
        """Return what `kvray status` says of the only shard."""
        (shard,) = json.loads(self.say("status", "--json", **environ))["shards"]
        return dict(shard)

    @contextlib.contextmanager
    def start(self, *args: str | Path, **environ: str) -> Iterator["subprocess.Popen[str]"]:
        """Start a command of kvray, or a script if the first argument is a path."""
        command = [sys.executable, *(() if isinstance(args[0], Path) else ("-m", "kvray"))]
        process = subprocess.Popen(
            [*command, *map(str, args)],
            env={**self.environ, **environ},
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = process.pid
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def interrupt(self, *args: str, when: Callable[[], bool], signum: signal.Signals) -> Done:
        """Run a command and send it a signal, and a second one soon after, once `when` is true."""
        with self.start(*args) as process:
            wait_for(lambda: process.poll() is not None or when(), "the moment")
            assert process.poll() is None, process.communicate()
            process.send_signal(signum)
            time.sleep(0.3)
            process.send_signal(signum)
            stdout, stderr = process.communicate(timeout=HANG_S)
        return Done(process.args, process.returncode, stdout, stderr)

    def leftovers(self) -> list[str]:
        """Return the files, shared memory and processes that the commands left."""
        found = [
            str(path)
            for path in self.directory.iterdir()
            if path.suffix != ".yaml" and not path.name.startswith("torchinductor_")  # torch's own
        ]
        found += [str(path) for path in SHM.glob("kvray-*") if path == self.node_dir]
        return found + [str(command) for command in self.commands()]

    def commands(self) -> list[list[str]]:
        """Return the command line of every such process, but for those that end meanwhile."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                found.append(process.cmdline())
        return found

    def has_engines(self) -> bool:
        """Return whether two replicas have started, or are about to."""
        return sum("kvray.reference.replica_child" in one for one in self.commands()) == 2

    def processes(self) -> list[psutil.Process]:
        """Return every living process that was started under this temporary directory."""
        marker = f"TMPDIR={self.directory}\0".encode()
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if marker in Path(f"/proc/{process.pid}/environ").read_bytes():
                    found.append(process)
        return found


@contextlib.contextmanager
def open_shell(name: str) -> Iterator[Shell]:
    """Give a shell, and end whatever its commands left running."""
    directory = Path(tempfile.mkdtemp(prefix="kvt-"))  # short: Ray's socket paths have a limit
    shell = Shell(directory, f"pytest-{os.getpid()}-{name}")
    try:
        yield shell
    finally:
        for process in shell.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(shell.node_dir, ignore_errors=True)
