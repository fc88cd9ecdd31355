"""Where the router looks for a call's prompt; the rest is tested in a real Serve."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray.serve")
from kvray.serve.router import KvRayRouter, _prompt_of

NOTHING: dict[str, Any] = {}
MARKS = {"salt": None, "lora": None}


@pytest.mark.parametrize(
    ("args", "kwargs", "tokens"),
    [
        ([[1, 2, 3], 16], {}, [1, 2, 3]),
        ([], {"kvray_tokens": [4, 5]}, [4, 5]),
        ([[1]], {"kvray_tokens": [4, 5]}, [4, 5]),
        ([{"messages": []}], {"kvray_tokens": np.array([7])}, [7]),
    ],
)
def test_token_ids_are_found(args: list[Any], kwargs: dict[str, Any], tokens: list[int]) -> None:
    found, marks = _prompt_of(args, kwargs)
    assert list(found) == tokens
    assert marks == MARKS


@pytest.mark.parametrize("args", [[], ["text"], [["a", "b"]], [[]], [None], [[True]]])
def test_what_is_no_prompt_is_passed_over(args: list[Any]) -> None:
    assert _prompt_of(args, {}) == (None, NOTHING)


def test_salt_and_adapter_are_parts_of_the_keys() -> None:
    kwargs = {"kvray_tokens": [1], "kvray_salt": "a/b", "kvray_lora": "/l"}
    assert _prompt_of([], kwargs)[1] == {"salt": "a/b", "lora": "/l"}


def test_an_argument_that_it_does_not_have_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVRAY_CONFIG", raising=False)
    monkeypatch.setattr("kvray.serve.router.MetricsThread", lambda *_: None)
    KvRayRouter.initialize_state(object.__new__(KvRayRouter), pool_block=8)  # type: ignore[call-arg]
    assert "no argument pool_block; correct request_router_kwargs" in caplog.text
