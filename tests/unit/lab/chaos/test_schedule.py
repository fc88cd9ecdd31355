import math

import pytest

from kvray.lab.chaos.schedule import KINDS, Fault, make_schedule

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
