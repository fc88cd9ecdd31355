"""Two engines of one model and different layouts on a tier that is up: what people get to see."""

from collections.abc import Callable

import pytest

from kvray.actors.tier import tier
from kvray.actors.tier.local_ray import LocalRay
from kvray.config import KVRayConfig
from tests.ray.command_line import open_shell
from tests.ray.conftest import TIMEOUT_S, Engine
from tests.waiting import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.long]


def test_status_shows_which_misses_are_incompatible_and_why(
    local: LocalRay, running: KVRayConfig, engine: Callable[[KVRayConfig], Engine]
) -> None:
    one, two = engine(running), engine(running)
    assert one.say("register('one', model='sha256:ab')") == "None"
    assert two.say("register('two', model='sha256:ab', tp_layout='tp2')") == "None"
    one.say("prefix_digests.note_stored(prefix_digest(range(100)))")
    wait_for(lambda: one.say("prefix_digests.waiting()") == "[]", "the report")
    asked = "prefix_digests.note_missed(prefix_digest(range(100)), 96)"
    wait_for(lambda: two.say(asked) and is_incompatible(), "the finding")
    with open_shell("incompatible") as shell:
        environ = {"KVRAY_CLUSTER_NAME": running.cluster_name, **local.environ()}
        shown = shell.run("status", "--address", local.address, **environ)
    assert shown.returncode == 0, shown.stderr
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert ["tp_layout", "tp1", "tp2"] in lines
    assert any(line[-1:] == ["incompatible"] for line in lines)
    assert "Replicas in different columns share no blocks" in shown.stdout


def is_incompatible() -> bool:
    """Return whether replica `two` counts incompatible tokens."""
    replicas = tier.status(timeout_s=TIMEOUT_S)["shards"][0]["replicas"]
    return any(one["counters"].get("miss_tokens_incompatible") for one in replicas)
