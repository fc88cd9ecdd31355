"""What may be written in a day: evenly, a quiet hour saved up, and not twice after a restart."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvray.store.nvme.terms import LEDGER_FILE, WriteBudget

DAY_S = 86400.0
PER_DAY = 24_000.0


def test_without_a_bound_anything_may_be_written() -> None:
    budget = WriteBudget(None, now=0.0)
    budget.spend(10**15, 1.0)
    assert budget.available(2.0) is None


def test_an_hour_is_saved_up_and_the_rest_comes_evenly() -> None:
    budget = WriteBudget(PER_DAY, now=0.0)
    assert budget.available(0.0) == 1000
    budget.spend(1000, 0.0)
    assert budget.available(0.0) == 0
    assert budget.available(DAY_S / 48) == 479
    assert budget.available(10 * DAY_S) == 1000


def test_what_was_too_much_is_made_up_for() -> None:
    budget = WriteBudget(PER_DAY, now=0.0)
    budget.spend(1958 + 10, 0.0)
    assert budget.available(DAY_S / 24) == 0
    assert budget.available(DAY_S / 12) == 948


@given(st.lists(st.tuples(st.floats(0, 3 * DAY_S), st.floats(0, 1)), min_size=1, max_size=60))
def test_in_any_day_no_more_than_a_days_bytes_are_spent(steps: list[tuple[float, float]]) -> None:
    budget, spent = WriteBudget(PER_DAY, now=0.0), []
    for at, share in sorted(steps):
        room = budget.available(at)
        assert room is not None
        budget.spend(int(room * share), at)
        spent.append((at, int(room * share)))
    for begin, _ in spent:
        assert sum(num for at, num in spent if begin <= at < begin + DAY_S) <= PER_DAY


def test_a_restart_goes_on_with_what_was_left(tmp_path: Path) -> None:
    before = WriteBudget(PER_DAY, now=0.0)
    before.spend(900, 100.0)
    before.save(tmp_path)
    after = WriteBudget(PER_DAY, now=101.0)
    after.load(tmp_path)
    assert after.available(101.0) in range(100, 102)


def test_a_ledger_from_the_future_or_a_broken_one_stops_nothing(tmp_path: Path) -> None:
    before = WriteBudget(PER_DAY, now=10 * DAY_S)
    before.spend(1000, 10 * DAY_S)
    before.save(tmp_path)
    after = WriteBudget(PER_DAY, now=0.0)
    after.load(tmp_path)
    assert after.available(DAY_S) == 1000
    for text in ("", "[]", '{"saved": "x", "at": 1}', '{"saved": 1}', '{"saved": NaN, "at": 0}'):
        (tmp_path / LEDGER_FILE).write_text(text)
        broken = WriteBudget(PER_DAY, now=0.0)
        broken.load(tmp_path)
        assert broken.available(0.0) is not None
