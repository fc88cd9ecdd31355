import pytest

from kvray.actors.mover.orders import SourceReport
from kvray.actors.staging import peers as rates_module
from kvray.actors.staging.peers import Rates
from kvray.actors.staging.plan import Peer

MB = 10**6


def note(
    rates: Rates, source: str, transport: str, *, num_bytes: int, seconds: float, now: float
) -> None:
    report = SourceReport(num_bytes=num_bytes, seconds=seconds, transport=transport)
    rates.note(source, report, now=now)


def test_a_large_fetch_tells_the_rate_and_a_small_one_the_latency() -> None:
    rates = Rates()
    note(rates, "b", "nixl", num_bytes=1000, seconds=0.01, now=0.0)
    note(rates, "b", "nixl", num_bytes=100 * MB, seconds=0.11, now=0.0)
    rate = rates.peer("b", 0.0)
    assert rate.latency_s == 0.01
    assert rate.bytes_per_s == pytest.approx(1e9)


def test_new_measurements_count_more_the_newer_they_are() -> None:
    rates = Rates()
    note(rates, "b", "nixl", num_bytes=100 * MB, seconds=0.1, now=0.0)
    for _ in range(20):
        note(rates, "b", "nixl", num_bytes=100 * MB, seconds=0.2, now=0.0)
    rate = rates.peer("b", 0.0)
    assert rate.bytes_per_s == pytest.approx(0.5e9, rel=0.01)


def test_transports_are_measured_apart_and_the_last_one_counts() -> None:
    rates = Rates()
    note(rates, "b", "nixl", num_bytes=100 * MB, seconds=0.1, now=0.0)
    note(rates, "b", "object_ref", num_bytes=100 * MB, seconds=1.0, now=1.0)
    assert rates.latest()["b"].transport == "object_ref"
    assert rates.peer("b", 1.0).bytes_per_s == pytest.approx(1e8)


def test_what_is_old_says_nothing() -> None:
    rates = Rates()
    note(rates, "b", "nixl", num_bytes=100 * MB, seconds=0.1, now=0.0)
    assert rates.peer("b", 31.0) == Peer()
    assert rates.peer("c", 0.0) == Peer()
    assert rates.latest()["b"].bytes_per_s == pytest.approx(1e9)


def test_nothing_that_came_measures_nothing() -> None:
    rates = Rates()
    note(rates, "b", "nixl", num_bytes=0, seconds=1.0, now=0.0)
    note(rates, "b", "nixl", num_bytes=5 * MB, seconds=0.0, now=0.0)
    assert rates.peer("b", 0.0) == Peer()


def test_of_too_many_rates_the_one_used_longest_ago_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates_module, "_RATES_MAX", 2)
    rates = Rates()
    for source in ("b", "c", "b", "d"):
        note(rates, source, "nixl", num_bytes=5 * MB, seconds=0.1, now=0.0)
    assert sorted(rates.latest()) == ["b", "d"]
