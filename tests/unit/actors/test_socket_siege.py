"""Whatever a process sends to a shard's socket, those who behave are served, and memory is flat."""

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from kvray.node.stage_calls import ShardSocket
from kvray.trace.request_note import RequestNote, pack
from tests.unit.actors.small_shard import NAMESPACE, WAIT_S

ROOT = Path(__file__).parents[3]
_GROWTH_MAX = 96 * 2**20
"""Bytes between the first and the last look: bounds that fill, and what an allocator keeps."""


class Figures(NamedTuple):
    rss: int
    heartbeat_s: float


@contextmanager
def process(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Give a process of `siege` once it has said that it has begun; it ends with the block."""
    command = [sys.executable, "-m", "tests.unit.actors.siege", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as made:
        try:
            assert made.stdout.readline()
            yield made
        finally:
            made.kill()


def look(shard: "subprocess.Popen[str]") -> Figures:
    shard.stdin.write("\n")
    shard.stdin.flush()
    rss, heartbeat_s = shard.stdout.readline().split()
    return Figures(int(rss), float(heartbeat_s))


@pytest.mark.parametrize(
    "seconds",
    [2.0, pytest.param(600.0, marks=[pytest.mark.long, pytest.mark.timeout(1800)])],
)
def test_an_engine_that_behaves_is_served_beside_a_process_that_does_not(seconds):
    parent = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvray-test-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, parent)
        shard = stack.enter_context(process("shard", str(parent / "node")))
        engine = stack.enter_context(contextlib.closing(ShardSocket(parent / "node")))
        namespace = NAMESPACE.to_wire()
        engine.call("register", timeout_s=WAIT_S, replica="good", rank=0, namespace=namespace)
        stack.enter_context(process("besiege", str(parent / "node"), "7"))
        slowest_s, count, before = 0.0, 0, None
        until = time.monotonic() + seconds
        while time.monotonic() < until or count < 10:
            began, count = time.monotonic(), count + 1
            note = pack(RequestNote(count, 1.0, 40, 4, 0, 0, 9, "not_stored"))
            answer = engine.call(
                "report",
                timeout_s=WAIT_S,
                replica="good",
                rank=0,
                counters={"requests": count},
                requests=[note],
            )
            assert answer["known"], "its connection was ended"
            slowest_s = max(slowest_s, time.monotonic() - began)
            if before is None and time.monotonic() > until - 0.8 * seconds:
                before = look(shard)
            time.sleep(0.02)
        figures = look(shard)
    growth = figures.rss - before.rss
    print(
        f"{count} reports, the slowest {slowest_s:.3f} s; heartbeats at most"
        f" {figures.heartbeat_s:.2f} s apart; {before.rss >> 20} MiB, grown by {growth >> 20} MiB"
    )
    assert growth < _GROWTH_MAX
    assert figures.heartbeat_s < WAIT_S / 2
