"""JSON lines over a pair of pipes: bounded in length, every wait with a deadline."""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any

from kvray.errors import ConfigError, KVRayError

MESSAGE_BYTES_MAX = 64 << 20
_READ_BYTES = 1 << 16


class PipeClosed(KVRayError):
    """The other end is gone."""


class JsonPipe:
    """One end of a conversation; owns both descriptors. One thread sends, one receives."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._buffer = bytearray()
        self._is_closed = False
        self._is_ended = False
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)

    def send(self, message: dict[str, Any], *, timeout_s: float) -> None:
        """Write one message.

        Raises:
            ConfigError: it is longer than `MESSAGE_BYTES_MAX`.
            PipeClosed: nobody reads, or nobody did within the timeout.
        """
        if self._is_closed or self._is_ended:
            raise PipeClosed("This end of the pipe is closed.")
        data = memoryview(json.dumps(message).encode() + b"\n")
        if len(data) > MESSAGE_BYTES_MAX:
            raise ConfigError(
                f"A message of {len(data)} bytes is longer than the {MESSAGE_BYTES_MAX} that a "
                "replica takes; send fewer prompts at a time."
            )
        deadline = time.monotonic() + timeout_s
        while data:
            self._wait(deadline, is_write=True)
            try:
                data = data[os.write(self._write_fd, data) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise PipeClosed("The other process has closed its pipe.") from error

    def receive(self, *, timeout_s: float | None) -> dict[str, Any]:
        """Return the next message; `timeout_s` None waits until the pipe ends.

        Raises:
            PipeClosed: the other end is closed, sent too long a line, or time is up.
        """
        if self._is_closed:
            raise PipeClosed("This end of the pipe is closed.")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > MESSAGE_BYTES_MAX:
                raise PipeClosed(f"The other process sent more than {MESSAGE_BYTES_MAX} bytes.")
            self._wait(deadline, is_write=False)
            try:
                chunk = os.read(self._read_fd, _READ_BYTES)
            except BlockingIOError:
                continue
            if not chunk:
                raise PipeClosed("The other process has closed its pipe.")
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        message: dict[str, Any] = json.loads(line)
        return message

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

    def _wait(self, deadline: float | None, *, is_write: bool) -> None:
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        fd = self._write_fd if is_write else self._read_fd
        poll = select.poll()
        poll.register(fd, select.POLLOUT if is_write else select.POLLIN)
        if not poll.poll(None if left is None else left * 1000):
            raise PipeClosed("The other process did not answer in time.")
