"""Child processes that end with their parent, and the pipes between the two."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import IO

from kvray.reference.pipe import JsonPipe

_PR_SET_PDEATHSIG = 1


def spawn_child(
    module: str, *, output: IO[bytes] | int, env: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], JsonPipe]:
    """Run `module`, whose `main` calls `join_parent`, and return it with the pipe to it.

    Args:
        module: its dotted name.
        output: where stdout and stderr of the child go.
        env: variables of the child besides those of this process.
    """
    from_child, child_write = os.pipe()
    child_read, to_child = os.pipe()
    command = [sys.executable, "-m", module, str(child_read), str(child_write)]
    command += [str(os.getpid()), str(int(_is_main_thread()))]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(child_read, child_write),
            env={**os.environ, **(env or {})},
        )
    except BaseException:
        os.close(from_child)
        os.close(to_child)
        raise
    finally:
        os.close(child_read)
        os.close(child_write)
    return process, JsonPipe(from_child, to_child)


def join_parent() -> JsonPipe:
    """Return the child's end of the pipe, and have the child die with its parent.

    The parent must be told of by the pipe's end as well: it may have spawned from a thread, and
    then there is no signal.
    """
    read_fd, write_fd, parent_pid, use_signal = map(int, sys.argv[1:5])
    # Ctrl-C reaches the whole foreground group; the parent decides what becomes of the child.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if use_signal:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(1)
    return JsonPipe(read_fd, write_fd)


def _is_main_thread() -> bool:
    """A death signal is tied to the *thread* that started the child: only this one lives on."""
    return threading.current_thread() is threading.main_thread()
