"""Finds the processes that have a file's bytes locked.

An open-file-description lock names no process: the kernel answers -1, as does /proc/locks. But
/proc/PID/fdinfo lists the locks of a description with each descriptor of it. It shows which
processes have it open, as they are numbered here, as far as this user may look. So nothing has to
be written down, or believed.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator


def of_file(file: os.stat_result, pids: Iterable[int] = ()) -> dict[int, set[int]]:
    """Return byte -> processes that have it locked; of `pids` if there are any."""
    found: dict[int, set[int]] = {}
    for pid in pids or (int(name) for name in os.listdir("/proc") if name.isdigit()):
        for byte in _bytes_of(pid, file):
            found.setdefault(byte, set()).add(pid)
    return found


def state_of(pid: int) -> str:
    """Return the letter of a process's state, such as T for a stopped one; "" if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b") ")[2][:1].decode()
    except OSError:
        return ""


def cpu_time_of(pid: int) -> tuple[bytes, ...]:
    """Return the CPU time of a process, in user and system mode; () if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return tuple(stat.read().rpartition(b") ")[2].split()[11:13])
    except OSError:
        return ()


def name_of(pid: int) -> str:
    """Return the name of a process as `ps` shows it; "" if it is gone."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as comm:
            return comm.read().decode(errors="replace").strip()
    except OSError:
        return ""


def end(pid: int, is_meant: Callable[[], bool]) -> bool:
    """Kill a process of this user, if `is_meant` says so; return whether it was sent the signal.

    A pidfd stands for one process, even if its pid is reused, and `is_meant` looks after it was
    opened. So what holds for the pid then holds for that process, or it has died since and the
    signal reaches nobody.
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
    """Yield the bytes of `file` that descriptors of a process have locked."""
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # another user's, or gone
        return
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(f"/proc/{pid}/fd/{descriptor}"), file):
                with open(f"/proc/{pid}/fdinfo/{descriptor}") as info:
                    lines = [line.split() for line in info]
                # Such as `lock: 1: OFDLCK ADVISORY WRITE -1 00:1b:5540 0 0`.
                yield from (
                    int(words[-2])
                    for words in lines
                    if words[:1] == ["lock:"] and "OFDLCK" in words
                )
