"""`kvray status --watch` goes on over a lost tier, and leaves the terminal as it was."""

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time

import pytest

from kvray.actors.tier import tier
from kvray.actors.tier.local_ray import LocalRay
from kvray.config import KVRayConfig
from tests.ray.command_line import open_shell
from tests.ray.conftest import TIMEOUT_S

pytestmark = [pytest.mark.ray, pytest.mark.long]

WAIT_S = 120.0
LEFT_SCREEN, SHOWN_CURSOR = b"\x1b[?1049l", b"\x1b[?25h"


class Terminal:
    """A pseudo-terminal; `seen` is what was written to it."""

    def __init__(self) -> None:
        self.ours, self.theirs = pty.openpty()
        self.seen = b""

    def read_until(self, text: bytes, start: int = 0) -> None:
        """Return when `text` was written after the first `start` bytes."""
        deadline = time.monotonic() + WAIT_S
        while text not in self.seen[start:]:
            assert time.monotonic() < deadline, self.seen[-2000:]
            if select.select([self.ours], [], [], 0.2)[0]:
                self.seen += os.read(self.ours, 65_536)

    def close(self) -> None:
        os.close(self.ours)
        os.close(self.theirs)


def test_it_goes_on_over_a_lost_tier_and_leaves_the_terminal_as_it_was(
    local: LocalRay, running: KVRayConfig
) -> None:
    terminal = Terminal()
    before = termios.tcgetattr(terminal.theirs)
    with open_shell("watch") as shell:
        environ = {
            **shell.environ,
            **local.environ(),
            "KVRAY_CLUSTER_NAME": running.cluster_name,
            "TERM": "xterm",
            "LINES": "40",
        }
        with subprocess.Popen(
            [sys.executable, "-m", "kvray", "status", "--watch", "--address", local.address],
            env=environ,
            cwd=shell.directory,
            stdin=terminal.theirs,
            stdout=terminal.theirs,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                terminal.read_until(b"serving")
                at = len(terminal.seen)
                tier.down(timeout_s=TIMEOUT_S, config=running)
                terminal.read_until(b"No answer", at)
                at = len(terminal.seen)
                tier.up(running, timeout_s=TIMEOUT_S)
                terminal.read_until(b"serving", at)
                process.send_signal(signal.SIGINT)
                assert process.wait(timeout=WAIT_S) == 0
                terminal.read_until(LEFT_SCREEN)
            finally:
                process.kill()
    assert SHOWN_CURSOR in terminal.seen
    assert termios.tcgetattr(terminal.theirs) == before
    terminal.close()
