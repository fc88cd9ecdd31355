"""Every policy does what `check_policy` says."""

from collections.abc import Callable

import pytest

from kvray.store.policy import POLICIES, prompts
from tests.conformance import POLICY_BEHAVIOURS, MakePolicy, check_policy


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("behaviour", POLICY_BEHAVIOURS, ids=lambda one: one.__name__)
def test_every_policy(
    behaviour: Callable[[MakePolicy], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "_PROMPTS", 512)
    check_policy(behaviour, POLICIES[name])
