"""Faults follow from a seed, strike when they can, end when they should, wait for each other."""

import math
from collections.abc import Sequence

import pytest

from kvray.lab.chaos.faults import Campaign, NotNow, NotYet
from kvray.lab.chaos.judge import IN_FLIGHT_MIN
from kvray.lab.chaos.schedule import KINDS, Fault, make_schedule

TICK_S = 0.125
ENDS_S = 100.0


class World:
    """A clock, requests in flight, and faults that strike unless told otherwise."""

    def __init__(self, *schedule: Fault) -> None:
        self.now = 1000.0
        self.in_flight = IN_FLIGHT_MIN
        self.out_of_reach: set[int] = set()
        self.error: type[NotNow] = NotNow
        self.told: list[tuple[str, int, float]] = []
        self.campaign = Campaign(
            schedule,
            self.strike,
            self.end,
            lambda: self.in_flight,
            ends_s=ENDS_S,
            now=lambda: self.now,
        )

    def strike(self, fault: Fault) -> None:
        if fault.number in self.out_of_reach:
            raise self.error("It is not running.")
        self.told.append(("strike", fault.number, self.now - 1000.0))

    def end(self, fault: Fault) -> None:
        self.told.append(("end", fault.number, self.now - 1000.0))

    def go_on_until(self, at: float) -> None:
        while self.now < 1000.0 + at:
            self.campaign.advance()
            self.now += TICK_S

    def skipped(self) -> Sequence[str | None]:
        return [strike.skipped for strike in self.campaign.strikes]


def fault(number: int, at: float, *, lasts_s: float = 0.0) -> Fault:
    return Fault(number=number, kind="stop_mover", strikes_s=at, ends_s=at + lasts_s, choice=0.5)


def test_a_fault_strikes_at_its_time_and_is_taken_back_at_its_end() -> None:
    world = World(fault(0, 1.0, lasts_s=2.0), fault(1, 2.0, lasts_s=0.5))
    world.go_on_until(4.0)
    assert world.told == [("strike", 0, 1.0), ("strike", 1, 2.0), ("end", 1, 2.5), ("end", 0, 3.0)]
    assert world.skipped() == [None, None]


def test_a_fault_that_waits_holds_up_no_other() -> None:
    world = World(fault(0, 1.0, lasts_s=2.0), fault(1, 2.0))
    world.out_of_reach.add(0)
    world.go_on_until(5.0)
    assert [one[:2] for one in world.told] == [("strike", 1), ("end", 1)]


def test_a_fault_that_waited_lasts_as_long_as_it_was_to() -> None:
    world = World(fault(0, 1.0, lasts_s=2.0))
    world.out_of_reach.add(0)
    world.go_on_until(5.0)
    world.out_of_reach.clear()
    world.go_on_until(10.0)
    assert world.told == [("strike", 0, 5.0), ("end", 0, 7.0)]


def test_a_fault_waits_for_requests_in_flight() -> None:
    world = World(fault(0, 1.0))
    world.in_flight = IN_FLIGHT_MIN - 1
    world.go_on_until(3.0)
    assert not world.told
    world.in_flight = IN_FLIGHT_MIN
    world.go_on_until(4.0)
    assert world.told[0] == ("strike", 0, 3.0)
    assert world.campaign.strikes[0].in_flight == IN_FLIGHT_MIN


def test_a_fault_that_waited_too_long_is_given_up_and_what_it_began_is_taken_back() -> None:
    world = World(fault(0, 1.0, lasts_s=2.0))
    world.out_of_reach.add(0)
    world.go_on_until(NotNow.patience_s + 5.0)
    assert world.told == [("end", 0, NotNow.patience_s + 1.0)]
    assert world.skipped() == ["It is not running."]


def test_a_fault_that_has_begun_is_waited_for_longer() -> None:
    world = World(fault(0, 1.0, lasts_s=2.0))
    world.out_of_reach.add(0)
    world.error = NotYet
    world.go_on_until(NotNow.patience_s + 5.0)
    assert not world.told
    world.out_of_reach.clear()
    world.go_on_until(NotNow.patience_s + 10.0)
    assert [one[:2] for one in world.told] == [("strike", 0), ("end", 0)]


def test_nothing_strikes_or_lasts_when_the_campaign_is_over() -> None:
    world = World(fault(0, ENDS_S - 2.0, lasts_s=9.0), fault(1, ENDS_S - 1.0))
    world.out_of_reach.add(1)
    world.go_on_until(ENDS_S + 5.0)
    assert world.told == [("strike", 0, ENDS_S - 2.0), ("end", 0, ENDS_S), ("end", 1, ENDS_S)]
    assert world.skipped() == [None, "It is not running."]


QUIET_S = 20.0
DURATION_S = 600.0


def schedule(seed: int = 1, **changes: object) -> list[Fault]:
    options: dict[str, object] = {
        "seed": seed,
        "duration_s": DURATION_S,
        "quiet_s": QUIET_S,
        "gap_s": 2.0,
        "kinds": KINDS,
    }
    return make_schedule(**options | changes)  # type: ignore[arg-type]


def test_equal_seeds_give_equal_schedules_and_others_do_not() -> None:
    assert schedule(3) == schedule(3)
    assert schedule(3) != schedule(4)


def test_every_kind_strikes_and_none_twice_as_often_as_another() -> None:
    kinds = [fault.kind for fault in schedule()]
    counts = [kinds.count(kind.name) for kind in KINDS]
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 1


def test_ten_minutes_have_two_hundred_faults() -> None:
    assert len(schedule()) >= 200


def test_faults_come_in_order_and_leave_the_end_of_the_run_quiet() -> None:
    faults = schedule()
    assert [fault.strikes_s for fault in faults] == sorted(fault.strikes_s for fault in faults)
    assert faults[0].strikes_s >= QUIET_S / 2
    for fault in faults:
        assert fault.strikes_s <= fault.ends_s <= DURATION_S - QUIET_S
        assert 0 <= fault.choice < 1


def test_some_stops_outlast_every_deadline_and_kills_are_over_at_once() -> None:
    lasts = {fault.number: fault.ends_s - fault.strikes_s for fault in schedule()}
    stops = [lasts[fault.number] for fault in schedule() if fault.kind == "stop_shard"]
    assert max(stops) > 10
    assert min(stops) < 3
    assert {lasts[fault.number] for fault in schedule() if fault.kind == "kill_shard"} == {0.0}


def test_one_kind_alone_is_repeated() -> None:
    faults = schedule(kinds=[KINDS[0]], duration_s=60.0)
    assert {fault.kind for fault in faults} == {KINDS[0].name}
    assert math.isclose(len(faults), 15, abs_tol=5)


def test_no_kind_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="no kind"):
        schedule(kinds=[])
