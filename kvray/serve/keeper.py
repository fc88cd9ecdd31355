"""Runs an engine's server and ends it with this process's parent: `python -m ... DIR COMMAND...`.

The parent holds the other end of stdin. When that closes, however the parent ended, the server and
all that it has started end too, and DIR goes. The exit status is the server's.

Ray kills a worker's children and its process group with it. So the one that keeps is a child of
this process, in a session of its own. If it is killed itself, the kernel tells the server to end.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

import psutil

_PR_SET_PDEATHSIG = 1
_GRACE_S = 10.0
"""How long a server may take to end by itself."""
_TRACKER = "multiprocessing.resource_tracker"
_TRACKERS_S = 5.0
"""How long Python's resource trackers may take to remove what the others have left in /dev/shm."""


def keep(directory: str, command: Sequence[str]) -> int:
    """Run `command` until it ends, or the parent is gone; return its exit status, as shells do.

    `directory` has its files, and is removed at the end.
    """
    # Ctrl-C reaches the whole foreground group; the parent decides what becomes of the server.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    front = os.pidfd_open(os.getpid())
    if keeper := os.fork():
        return _exit_status(os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1]))
    os.setsid()
    end_with_parent = partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGTERM)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=end_with_parent,  # noqa: PLW1509 - there is one thread here
    )
    # Not reaped before the end of its session: until then no other process gets its number.
    server = os.pidfd_open(process.pid)
    ended, _, _ = select.select([server, sys.stdin, front], [], [])
    if server not in ended:
        os.kill(process.pid, signal.SIGTERM)
        select.select([server], [], [], _GRACE_S)
    _end_session(process.pid)
    shutil.rmtree(directory, ignore_errors=True)
    return _exit_status(process.wait())


def _exit_status(code: int) -> int:
    return code if code >= 0 else 128 - code


def _end_session(session: int) -> None:
    """End what is left of the server: ranks and workers do not all end with it.

    A resource tracker ends by itself once nobody is left that it works for.
    """
    trackers = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(one.pid) == session:
                if _TRACKER in " ".join(one.cmdline()):
                    trackers.append(one)
                else:
                    one.kill()
    for one in psutil.wait_procs(trackers, timeout=_TRACKERS_S)[1]:
        with contextlib.suppress(psutil.Error):
            one.kill()


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1], sys.argv[2:]))
