"""The standard output of commands; a failed write is an error of ours."""

import os
from typing import Any, TextIO

from kvray.errors import KVRayError

_EXIT_PIPE = 141
"""The status of a process that SIGPIPE ended, as other tools end here."""


class OutputLost(KVRayError):
    """The command's output cannot be written."""


class Output:
    """A stream that turns the OSError of the stream below into OutputLost."""

    def __init__(self, stream: TextIO | None) -> None:
        """Write to `stream`; None: the process has a closed standard output."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text`.

        Raises:
            OutputLost: the disk is full, for example.
            SystemExit: the reader has enough, as `head` does. That is no error.
        """
        if self._stream is None:
            raise OutputLost("stdout is closed; give the command one, or send it to /dev/null.")
        try:
            return self._stream.write(text)
        except OSError as error:
            raise self._lost(error) from None

    def flush(self) -> None:
        """Send on everything that was written; raises as `write` does."""
        try:
            if self._stream is not None:
                self._stream.flush()
        except OSError as error:
            raise self._lost(error) from None

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lost(self, error: OSError) -> OutputLost | SystemExit:
        """Return what to raise, and discard the buffer, which Python would flush at exit."""
        assert self._stream is not None
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        if isinstance(error, BrokenPipeError):
            return SystemExit(_EXIT_PIPE)
        return OutputLost(f"stdout cannot be written: {error.strerror}.")
