import pytest

from kvray.actors.tier import rollout
from kvray.actors.tier.rollout import Patience


class Clock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(rollout, "time", made)
    return made


def test_a_wait_in_which_nothing_moves_ends(clock: Clock) -> None:
    wait = Patience(30)
    assert not wait.is_over("starting")
    clock.now += 29
    assert not wait.is_over("starting")
    clock.now += 2
    assert wait.is_over("starting")


def test_a_wait_in_which_something_moves_goes_on_until_it_has_taken_long(clock: Clock) -> None:
    wait = Patience(30, most_s=100)
    for done in range(4):
        clock.now += 25
        assert not wait.is_over(done)
    clock.now += 1
    assert wait.is_over(5)


def test_a_look_may_have_a_limit_of_its_own(clock: Clock) -> None:
    wait = Patience(30)
    wait.is_over("no node")
    clock.now += 5
    assert not wait.is_over("no node")
    assert wait.is_over("no node", still_s=2)
