"""A child process that ends with its parent, and the messages that the two exchange."""

import contextlib
import ctypes
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import IO, Any

import psutil

from kvray.errors import ConfigError, KVRayError

MESSAGE_BYTES_MAX = 64 << 20
_READ_BYTES = 1 << 20
_LEAST_S = 0.001
"""Of a wait whose time is up: what is here already is taken."""
_LENGTH = struct.Struct("<Q")
_PR_SET_PDEATHSIG = 1
_DIAGNOSIS_S = 2.0
_KILL_TIMEOUT_S = 5.0
_HEARD_TIMEOUT_S = 900.0
"""How long a parent may take to read an answer: it may first read those of others."""
_TAIL_BYTES = 2000


class PipeClosed(KVRayError):
    """The other end is gone."""


class Pipe:
    """One end of a pair of sockets, which it owns; one thread uses it at a time.

    Messages are any objects that pickle: both ends are processes of one engine, or of one test.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, message: object, *, timeout_s: float) -> None:
        """Write one message; PipeClosed if nobody reads it in time, ConfigError if too long."""
        packed = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if len(packed) > MESSAGE_BYTES_MAX:
            raise ConfigError(
                f"A message of {len(packed)} bytes is longer than the {MESSAGE_BYTES_MAX} that a "
                "replica takes; send fewer prompts at a time."
            )
        with _closed_as_error():
            self._end.settimeout(timeout_s)
            self._end.sendall(_LENGTH.pack(len(packed)) + packed)

    def receive(self, *, timeout_s: float | None) -> Any:
        """Return the next message; None waits for it without end.

        PipeClosed if the other end is closed, announces too long a message, or time is up.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size, deadline))
        if length > MESSAGE_BYTES_MAX:
            raise PipeClosed(f"The other process sent more than {MESSAGE_BYTES_MAX} bytes.")
        return pickle.loads(self._take(length, deadline))  # noqa: S301 (from our own process)

    def _take(self, size: int, deadline: float | None) -> bytearray:
        taken = bytearray()
        with _closed_as_error():
            while len(taken) < size:
                left = None if deadline is None else max(deadline - time.monotonic(), _LEAST_S)
                self._end.settimeout(left)
                chunk = self._end.recv(min(size - len(taken), _READ_BYTES))
                if not chunk:
                    raise ConnectionResetError
                taken += chunk
        return taken

    def end(self) -> None:
        """Send nothing more, and go on receiving. Twice is fine."""
        with contextlib.suppress(OSError):  # the other end is gone
            self._end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket. Twice is fine."""
        self._end.close()


@contextlib.contextmanager
def _closed_as_error() -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise PipeClosed("The other process did not answer in time.") from None
    except OSError as error:
        raise PipeClosed("The other process has closed its pipe.") from error


class Child:
    """A process that runs one of our modules and ends with this one, and the pipe to it.

    Where it does not answer, a KVRayError says how it ended. A KVRayError that it sends in place of
    a message is raised here, with its name.
    """

    def __init__(
        self,
        name: str,
        module: str,
        *,
        output: IO[bytes] | int,
        env: Mapping[str, str] | None = None,
        advice: str = "",
    ) -> None:
        """Run `module`, whose `main` calls `join_parent`.

        `output` receives its stdout and stderr, and errors quote the end of a file; the caller
        closes it. `env` are variables besides those of this process. `advice` ends each error.
        """
        near, far = socket.socketpair()
        # The kernel ties a death signal to the thread that starts the child; only main lives on.
        use_signal = threading.current_thread() is threading.main_thread()
        arguments = (far.fileno(), os.getpid(), int(use_signal))
        with far:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", module, *map(str, arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(far.fileno(),),
                    env={**os.environ, **(env or {})},
                )
            except BaseException:
                near.close()
                raise
        self.name = name
        self.pipe = Pipe(near)
        self._output = output
        self._advice = advice

    def send(self, message: object, *, timeout_s: float) -> None:
        """Send a message, as `Pipe.send`."""
        try:
            self.pipe.send(message, timeout_s=timeout_s)
        except PipeClosed as error:
            raise self.death(str(error)) from error

    def receive(self, *, timeout_s: float | None) -> Any:
        """Return the next message, as `Pipe.receive`."""
        try:
            message = self.pipe.receive(timeout_s=timeout_s)
        except PipeClosed as error:
            raise self.death(str(error)) from error
        if isinstance(message, KVRayError):
            raise type(message)(f"{self.name} failed: {message}")
        return message

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit status, or None if there is none in time."""
        try:
            return self.process.wait(max(timeout_s, 0.0))
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """End the process and those below it at once, as a crash would. Twice is fine."""
        if self.process.poll() is None:
            below = _below(self.process.pid)
            self.process.kill()
            for process in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        if self.wait(_KILL_TIMEOUT_S) is None:
            raise KVRayError(f"{self.name} (pid {self.process.pid}) cannot be ended.")

    def close(self) -> None:
        """Kill the process, and close the pipe, which no thread reads any more. Twice is fine."""
        self.kill()
        self.pipe.close()

    def death(self, reason: str) -> KVRayError:
        """Return how the process ended; one that lives on, but does not answer, is ended."""
        code = self.wait(_DIAGNOSIS_S)
        if code is None:
            self.process.kill()
            end = f"was waited for in vain, and killed: {reason.rstrip('.')}"
        else:
            end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited: {code}"
        last = "" if isinstance(self._output, int) else last_words(self._output)
        return KVRayError(" ".join(filter(None, (f"{self.name} {end}.", self._advice, last))))


def last_words(log: IO[bytes]) -> str:
    """Return the end of what a process has printed to `log`, as the end of an error."""
    place = log.fileno()
    tail = os.pread(place, _TAIL_BYTES, max(os.fstat(place).st_size - _TAIL_BYTES, 0))
    said = tail.decode(errors="replace").strip()
    return f"It last printed: {said}" if said else ""


def _below(pid: int) -> list[psutil.Process]:
    """Return the processes that a process has started; not all of them end with it.

    Python's resource trackers are left out: they remove what the others had in shared memory.
    """
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if not any("resource_tracker" in word for word in process.cmdline()):
                    found.append(process)
    return found


def join_parent() -> Pipe:
    """Return the child's end of the pipe, and have the child die with its parent.

    A parent that spawned it from a thread cannot use the death signal; a thread here waits for its
    end in place of the kernel.
    """
    end, parent_pid, use_signal = map(int, sys.argv[1:4])
    # Ctrl-C reaches the whole foreground group; the parent decides what becomes of the child.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if use_signal:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_end_with, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:
        sys.exit(1)
    return Pipe(socket.socket(fileno=end))


def serve(work: object) -> None:
    """Answer the parent's calls with the methods of `work` until it closes its pipe.

    A call is a name and keyword arguments. A KVRayError is an answer.
    """
    pipe = join_parent()
    with contextlib.suppress(PipeClosed):
        while True:
            name, arguments = pipe.receive(timeout_s=None)
            try:
                done = getattr(work, name)(**arguments)
            except KVRayError as error:
                done = error
            pipe.send(done, timeout_s=_HEARD_TIMEOUT_S)


def _end_with(parent_pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(parent_pid)], [], [])
    os.kill(os.getpid(), signal.SIGKILL)
