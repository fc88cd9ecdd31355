"""Pins as shards tell them to each other: the later one counts, in whatever order they come."""

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.actors.shard.pinning.pin import KEYS_MAX, PINS_MAX, Pin, Pins
from kvray.errors import CapacityError, ConfigError

NOW = 1000.0
BOUNDS = {"now": NOW, "bytes_max": 100, "owner_bytes_max": 60}


def pin(name: str = "p", at: float = NOW, num_blocks: int = 1, **changes: Any) -> Pin:
    values: dict[str, Any] = {
        "name": name,
        "owner": "me",
        "made_at": at,
        "until": NOW + 60.0,
        "num_tokens": 32,
        "block_bytes": 10,
        "num_parts": 1,
        "keys": bytes(32) * num_blocks,
    }
    return Pin(**(values | changes))


CHANGES = st.lists(
    st.builds(
        pin,
        st.sampled_from("abc"),
        st.integers(0, 5).map(float),
        st.integers(0, 1),
        until=st.sampled_from([NOW - 1, NOW + 5, NOW + 9]),
    ),
    max_size=12,
    unique_by=lambda one: (one.name, one.made_at, bool(one.keys)),
)


@given(CHANGES, st.randoms())
def test_shards_that_heard_the_same_agree_whatever_the_order(
    changes: list[Pin], random: Any
) -> None:
    one, other = Pins(), Pins()
    one.take(changes, now=NOW)
    random.shuffle(changes)
    for change in changes:
        other.take([change], now=NOW)
    assert one.live(NOW) == other.live(NOW)
    assert one.known() == other.known()


@given(CHANGES, CHANGES)
def test_shards_that_ask_each_other_agree(mine: list[Pin], theirs: list[Pin]) -> None:
    one, other = Pins(), Pins()
    one.take(mine, now=NOW)
    other.take(
        [pin for pin in theirs if pin.made_at not in {each.made_at for each in mine}], now=NOW
    )
    one.take(other.beyond(one.known()), now=NOW)
    other.take(one.beyond(other.known()), now=NOW)
    assert one.live(NOW) == other.live(NOW)


def test_a_removed_pin_does_not_come_back_from_a_shard_that_missed_it() -> None:
    pins = Pins()
    pins.take([pin()], now=NOW)
    pins.take([pins.removed("p", now=NOW - 5.0)], now=NOW)  # by a clock that is behind
    assert not pins.take([pin()], now=NOW)
    assert pins.live(NOW) == []


def test_pins_have_bounds() -> None:
    pins = Pins()
    pins.take([pin("a", num_blocks=5), pin("b", owner="you", num_blocks=3)], now=NOW)
    pins.check(pin("c", num_blocks=1), **BOUNDS)
    pins.check(pin("a", num_blocks=6), **BOUNDS)  # in place of itself
    with pytest.raises(CapacityError, match=r"the pins of 'me' \(pins\.owner_share\)"):
        pins.check(pin("c", num_blocks=2), **BOUNDS)
    with pytest.raises(CapacityError, match=r"all pins \(pins\.share\)"):
        pins.check(pin("c", owner="them", num_blocks=3), **BOUNDS)
    with pytest.raises(CapacityError, match=str(KEYS_MAX)):
        pins.check(pin("c", num_blocks=KEYS_MAX), **BOUNDS)
    pins.take([pin(f"n{at}") for at in range(2 * PINS_MAX)], now=NOW)
    assert len(pins.known()) == PINS_MAX


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"until": 1},
        {"keys": b"short"},
        {"num_parts": -1},
        {"name": None},
        {"more": 1},
    ],
)
def test_a_file_s_values_that_make_no_pin_are_refused(values: dict[str, Any]) -> None:
    good = asdict(pin())
    assert Pin.from_values(good) == pin()
    with pytest.raises((ValueError, TypeError)):
        Pin.from_values({} if not values else good | values)


def test_who_has_no_such_pin_cannot_remove_it() -> None:
    with pytest.raises(ConfigError, match="no pin"):
        Pins().removed("p", now=NOW)
