"""Removes a cluster on this machine once the process that started it has let go of it.

A process of its own, so that a killed one leaves nothing behind either: it waits for the end of
its standard input. Run as `python -m kvray.lab.chaos.cleanup DIRECTORY...`.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

MARK = "_KVRAY_MACHINE"
"""Set in the environment of every process of a cluster: its directory."""

_END_TIMEOUT_S = 15.0
_POLL_S = 0.05


def main() -> None:
    """Wait until standard input ends; then end the processes and remove the directories."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    directories = [Path(name) for name in sys.argv[1:]]
    sys.stdin.read()
    # Processes may start others meanwhile.
    deadline = time.monotonic() + _END_TIMEOUT_S
    while (found := processes_of(directories[0])) and time.monotonic() < deadline:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=_POLL_S)
    for directory in directories:
        for disk in reversed(psutil.disk_partitions(all=True)):
            if Path(disk.mountpoint).is_relative_to(directory):
                command = ["umount", "--lazy", disk.mountpoint]
                subprocess.run(command, check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(directory, ignore_errors=True)


def processes_of(directory: Path) -> list[psutil.Process]:
    """Return the living processes that carry the mark or have a file of `directory` open.

    Ray's workers write their titles over their environment, but all of them have a log open.
    """
    found = []
    for process in psutil.process_iter():
        if process.pid != os.getpid() and _belongs(process.pid, directory):
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return found


def _belongs(pid: int, directory: Path) -> bool:
    with contextlib.suppress(OSError):
        if f"{MARK}={directory}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
            return True
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{name}").startswith(f"{directory}/"):
                    return True
    return False


if __name__ == "__main__":
    main()
