"""Keeps a process that asks the tier, and hands its answers to the board."""

import asyncio
import contextlib
import json
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path

from kvray.cli.page.board import STATUS, Board

_LINE_BYTES_MAX = 64 * 2**20
_SILENT_S = 20.0
"""A process that says nothing for so long hangs: each of its questions has a deadline."""
_PAUSE_S = 1.0


class Feed:
    """The process that asks, and another one in its place when it ends or hangs."""

    def __init__(
        self, board: Board, config: Path | None, address: str | None, *, verbose: bool
    ) -> None:
        """Feed `board` about the tier of a configuration file, in the Ray cluster at `address`."""
        self._board = board
        self._command = [sys.executable, "-m", "kvray.cli.page.asker"]
        self._command += [str(config or ""), address or ""]
        self._stderr = None if verbose else DEVNULL
        self._process: Process | None = None

    def look(self) -> None:
        """Tell the process that somebody looks at the page."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, RuntimeError):  # it has just ended
                self._process.stdin.write(b"\n")

    async def run(self) -> None:
        """Feed the board until this is cancelled."""
        while True:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=self._stderr,
                limit=_LINE_BYTES_MAX,
                start_new_session=True,  # Ctrl-C is for the page's process, which ends this one
            )
            try:
                why = await self._read(self._process)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
            self._board.lose(why, time.time())
            await asyncio.sleep(_PAUSE_S)

    async def _read(self, process: Process) -> str:
        """Take answers until the process ends or hangs; return which of both."""
        assert process.stdout is not None
        heard_at = time.monotonic()
        while (left_s := heard_at + _SILENT_S - time.monotonic()) > 0:
            try:
                line = await asyncio.wait_for(process.stdout.readline(), left_s)
            except asyncio.TimeoutError:
                break
            if not line:
                return "The process that asks the tier has ended; the next one starts."
            told = json.loads(line)
            if told["part"] == STATUS:
                heard_at = time.monotonic()
            self._board.take(told, time.time())
        return "The Ray cluster does not answer; it is asked again."
