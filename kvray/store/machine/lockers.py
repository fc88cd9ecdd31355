"""Which processes have a file's bytes locked, as the kernel tells it.

An open-file-description lock names no process: asked for one, the kernel answers -1, as does
/proc/locks. But it lists the locks of a description with each descriptor of it, in
/proc/PID/fdinfo, and so tells which processes have it open: as they are numbered here, and as far
as this user may look. Nothing has to be written down, and nothing written down has to be believed.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator


def of_file(file: os.stat_result, pids: Iterable[int] = ()) -> dict[int, set[int]]:
    """Return the processes that have each byte of a file locked; of `pids` if there are any."""
    found: dict[int, set[int]] = {}
    for pid in pids or (int(name) for name in os.listdir("/proc") if name.isdigit()):
        for byte in _bytes_of(pid, file):
            found.setdefault(byte, set()).add(pid)
    return found


def state_of(pid: int) -> str:
    """Return the letter of a process's state, such as T for one that is stopped; "" if gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b") ")[2][:1].decode()
    except OSError:
        return ""


def name_of(pid: int) -> str:
    """Return the name of a process as `ps` shows it; "" if it is gone."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as comm:
            return comm.read().decode(errors="replace").strip()
    except OSError:
        return ""


def end(pid: int, is_meant: Callable[[], bool]) -> bool:
    """Kill a process of this user, if `is_meant` says so; return whether it was sent the signal.

    A pidfd stands for one process, whatever becomes of its pid, and `is_meant` looks after it was
    opened: what holds for the pid then holds for that process, or it has died since and the signal
    reaches nobody.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.getuid() or not is_meant():
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        return False  # it has just ended
    finally:
        os.close(pidfd)
    return True


def _bytes_of(pid: int, file: os.stat_result) -> Iterator[int]:
    """Give the bytes of `file` that descriptors of a process have locked; none if it is gone."""
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # another user's, or gone
        return
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(f"/proc/{pid}/fd/{descriptor}"), file):
                with open(f"/proc/{pid}/fdinfo/{descriptor}") as info:
                    yield from _locked(info)


def _locked(info: Iterable[str]) -> Iterator[int]:
    """Give the bytes of lines like `lock: 1: OFDLCK ADVISORY WRITE -1 00:1b:5540 0 0`."""
    for line in info:
        words = line.split()
        if words[:1] == ["lock:"] and "OFDLCK" in words:
            yield int(words[-2])
