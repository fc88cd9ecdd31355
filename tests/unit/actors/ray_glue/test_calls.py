"""Ray's own errors are the tier's sentences."""

from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from kvray.actors.ray_glue import calls
from kvray.errors import ShardUnavailable


def test_a_head_that_does_not_answer_when_an_actor_is_looked_up_is_a_sentence(monkeypatch):
    def late(*_: Any, **__: Any) -> None:
        raise GetTimeoutError("Failed to get the actor: is the GCS server dead?")

    monkeypatch.setattr(calls, "current_namespace", lambda: "kvray-prod")
    monkeypatch.setattr("ray.get_actor", late)
    with pytest.raises(ShardUnavailable, match="did not answer in time"):
        calls.get_actor("kvray-lookup")
