"""Ends what a session of tests has started, however the session ends.

A process of its own, so that it also works after `kill -9`: it waits for the end of its standard
input. Run as `python -m tests.cleanup MARK`, where MARK is in the environment of all of them.
"""

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil

MARK = "_KVRAY_TEST_SESSION"
"""Set in the environment of every process of a session: its directory. Those of its workers begin
with the same name."""
_DIRECTORIES = "TMPDIR", "HOME", "_KVRAY_MACHINE", "KVRAY_LOCAL_RAY"
"""Variables of such a process that may name a directory of the session."""
_END_S = 60.0


def main() -> None:
    """Wait until standard input ends; then end the processes, and remove their directories."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    session = sys.argv[1]
    sys.stdin.read()
    directories = {*Path(session).parent.glob(f"{Path(session).name}*")}
    until = time.monotonic() + _END_S
    while (found := processes_of(session)) and time.monotonic() < until:
        for process in found:
            directories |= _directories_of(process)
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=1.0)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def processes_of(session: str, *, by: str = MARK) -> list[psutil.Process]:
    """Return the living processes of a session, but for this one; daemons have no parent to tell.

    They have `session` in their variable `by`. Ray's workers write their titles over their
    environment, and are found by their parents.
    """
    mark = f"{by}={session}\0".encode()
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if mark in Path(f"/proc/{process.pid}/environ").read_bytes():
                found.update([process, *process.children(recursive=True)])
    return [one for one in found if one.pid != os.getpid() and _is_alive(one)]


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _directories_of(process: psutil.Process) -> set[Path]:
    """Return the temporary directories that the process was given; not the machine's own."""
    with contextlib.suppress(psutil.Error):
        named = {Path(process.environ().get(name, "/")) for name in _DIRECTORIES}
        return {path for path in named if path.parent == Path(tempfile.gettempdir())}
    return set()


if __name__ == "__main__":
    main()
