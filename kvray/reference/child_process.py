"""A child process that ends with its parent, and the messages that the two exchange."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import IO, Any

from kvray.errors import ConfigError, KVRayError

MESSAGE_BYTES_MAX = 64 << 20
_READ_BYTES = 1 << 16
_LENGTH = struct.Struct("<Q")
_PR_SET_PDEATHSIG = 1


class PipeClosed(KVRayError):
    """The other end is gone."""


class Pipe:
    """One end of a pair of pipes; owns both descriptors. One thread sends, one receives.

    Messages are any objects that pickle: both ends are processes of one engine, or of one test.
    """

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._buffer = bytearray()
        self._is_closed = False
        self._is_ended = False
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)

    def send(self, message: object, *, timeout_s: float) -> None:
        """Write one message; PipeClosed if nobody reads it in time, ConfigError if too long."""
        if self._is_ended:
            raise PipeClosed("This end of the pipe is closed.")
        packed = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if len(packed) > MESSAGE_BYTES_MAX:
            raise ConfigError(
                f"A message of {len(packed)} bytes is longer than the {MESSAGE_BYTES_MAX} that a "
                "replica takes; send fewer prompts at a time."
            )
        data = memoryview(_LENGTH.pack(len(packed)) + packed)
        deadline = time.monotonic() + timeout_s
        while data:
            _wait(self._write_fd, select.POLLOUT, deadline)
            try:
                data = data[os.write(self._write_fd, data) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise PipeClosed("The other process has closed its pipe.") from error

    def receive(self, *, timeout_s: float | None) -> Any:
        """Return the next message; None waits for it without end.

        PipeClosed if the other end is closed, announces too long a message, or time is up.
        """
        if self._is_closed:
            raise PipeClosed("This end of the pipe is closed.")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size, deadline))
        if length > MESSAGE_BYTES_MAX:
            raise PipeClosed(f"The other process sent more than {MESSAGE_BYTES_MAX} bytes.")
        return pickle.loads(self._take(length, deadline))  # noqa: S301 (from our own process)

    def _take(self, size: int, deadline: float | None) -> bytes:
        while len(self._buffer) < size:
            _wait(self._read_fd, select.POLLIN, deadline)
            try:
                chunk = os.read(self._read_fd, max(_READ_BYTES, size - len(self._buffer)))
            except BlockingIOError:
                continue
            if not chunk:
                raise PipeClosed("The other process has closed its pipe.")
            self._buffer += chunk
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    def end(self) -> None:
        """Send nothing more, and go on receiving. Twice is fine."""
        if not self._is_ended:
            self._is_ended = True
            os.close(self._write_fd)

    def close(self) -> None:
        """Close both descriptors. Twice is fine."""
        self.end()
        if not self._is_closed:
            self._is_closed = True
            os.close(self._read_fd)


def spawn_child(
    module: str, *, output: IO[bytes] | int, env: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], Pipe]:
    """Run `module`, whose `main` calls `join_parent`, and return it with the pipe to it.

    `output` receives its stdout and stderr; `env` are variables besides those of this process.
    """
    from_child, child_write = os.pipe()
    child_read, to_child = os.pipe()
    # The kernel ties a death signal to the thread that starts the child; only main lives on.
    use_signal = threading.current_thread() is threading.main_thread()
    arguments = (child_read, child_write, os.getpid(), int(use_signal))
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
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
    return process, Pipe(from_child, to_child)


def join_parent() -> Pipe:
    """Return the child's end of the pipe, and have the child die with its parent.

    A parent that spawned it from a thread cannot use the death signal; a thread here waits for its
    end in place of the kernel.
    """
    read_fd, write_fd, parent_pid, use_signal = map(int, sys.argv[1:5])
    # Ctrl-C reaches the whole foreground group; the parent decides what becomes of the child.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if use_signal:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_end_with, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:
        sys.exit(1)
    return Pipe(read_fd, write_fd)


def _end_with(parent_pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        _wait(os.pidfd_open(parent_pid), select.POLLIN, None)
    os.kill(os.getpid(), signal.SIGKILL)


def _wait(fd: int, event: int, deadline: float | None) -> None:
    poll = select.poll()
    poll.register(fd, event)
    if not poll.poll(None if deadline is None else max(deadline - time.monotonic(), 0.0) * 1000):
        raise PipeClosed("The other process did not answer in time.")
