"""What is made of Ray's own answers."""

import time

import pytest
from ray._private.state import state

from kvray.actors.ray_glue.private import draining_nodes


def test_a_node_has_the_time_that_ray_gives_and_any_if_it_lives_on_after_that(monkeypatch):
    now_ms = 1000 * time.time()
    found = {"a": int(now_ms + 90_000), "late": int(now_ms - 300_000), "without a deadline": 0}
    monkeypatch.setattr(state, "get_draining_nodes", lambda: found)
    left_s = pytest.approx(90, abs=60)
    assert draining_nodes() == {"a": left_s, "late": None, "without a deadline": None}
