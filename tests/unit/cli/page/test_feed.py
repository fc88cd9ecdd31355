"""The process that asks: its answers reach the board, and another follows when it ends or hangs."""

import asyncio
import json
import sys
import time

import pytest

from kvray.cli.page import feed as feeding
from kvray.cli.page.board import STATUS, Board
from kvray.cli.page.feed import Feed
from tests.unit.cli.page.answers import status

ANSWER = json.dumps({"part": STATUS, "answer": status()})
ENDS = f"print({ANSWER!r})"
HANGS = f"import time; print({ANSWER!r}, flush=True); time.sleep(60)"
ECHOES = f"import sys; sys.stdin.readline(); print({ANSWER!r}, flush=True); sys.stdin.read()"


def fed(code: str, until: str, *, looks: bool = False) -> str:
    """Feed a board by a process that runs `code` until it has this trouble; return the trouble."""
    board = Board("prod")
    feed = Feed(board, None, None, verbose=True)
    feed._command = [sys.executable, "-c", code]

    async def run() -> str:
        task = asyncio.create_task(feed.run())
        deadline = time.monotonic() + 20
        trouble = ""
        while time.monotonic() < deadline:
            await asyncio.sleep(0.05)
            if looks:
                feed.look()
            part = board.state(time.time(), 0)["parts"][STATUS]
            trouble = part["trouble"]
            if part["age_s"] is not None and until in trouble:
                break
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return trouble

    return asyncio.run(run())


def test_process_that_ends_is_said() -> None:
    assert "has ended" in fed(ENDS, "has ended")


def test_process_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "_SILENT_S", 1.0)
    assert "does not answer" in fed(HANGS, "does not answer")


def test_process_hears_that_somebody_looks() -> None:
    assert fed(ECHOES, "", looks=True) == ""
