"""Pins of shards without Ray: what is pinned stays, over restarts too."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvray.actors.owner.ownership import PINS_FILE
from kvray.actors.shard.pinning import Pin
from kvray.actors.shard.shard import Shard
from kvray.errors import CapacityError, ConfigError
from kvray.identity.block import BlockKey
from kvray.store import Arena
from tests.unit.actors.conftest import StartShard
from tests.unit.actors.small_shard import open_arena, wait_until_serving
from tests.unit.actors.test_shard_staging import Tier, tier
from tests.unit.store.small_arena import SLOT, chain, store
from tests.waiting import wait_for

__all__ = ["tier"]

ROOM = 6  # blocks that an arena of 64 keeps for pins


@pytest.fixture
def arena(shard: Shard, directory: Path) -> Iterator[Arena]:
    """The arena of `shard`, as an engine has it."""
    with contextlib.closing(open_arena(directory)) as made:
        yield made


def pin_of(keys: list[BlockKey], name: str = "p", **changes: Any) -> Pin:
    values: dict[str, Any] = {
        "name": name,
        "owner": "me",
        "made_at": time.time(),
        "until": time.time() + 60.0,
        "num_tokens": 32 * len(keys),
        "block_bytes": SLOT,
        "num_parts": 1,
        "keys": b"".join(keys),
    }
    return Pin(**(values | changes))


def kept(shard: Shard) -> dict[str, int]:
    return {one["name"]: one["blocks_here"] for one in shard.status()["pinned"]["pins"]}


def fill(arena: Arena, name: str = "other") -> None:
    """Store more than an arena takes."""
    for at in range(12):
        store(arena, chain(8, seed=f"{name} {at}"))


def test_pinned_blocks_stay_whatever_else_comes(shard: Shard, arena: Arena) -> None:
    keys, other = chain(ROOM), chain(ROOM, seed="not pinned")
    for each in (keys, other):
        store(arena, each)
    shard.requests.pin(pin_of(keys))
    fill(arena)
    assert arena.match(keys) == ROOM
    assert not arena.match(other)
    shard.clear(10.0)
    assert arena.match(keys) == ROOM
    assert shard.status()["pinned"]["bytes"] == ROOM * SLOT


def test_what_comes_after_its_pin_is_held_too(shard: Shard, arena: Arena) -> None:
    keys = chain(ROOM)
    shard.requests.pin(pin_of(keys))
    assert kept(shard) == {"p": 0}
    store(arena, keys)
    wait_for(lambda: kept(shard) == {"p": ROOM})


def test_a_pin_that_is_removed_or_over_holds_nothing(shard: Shard, arena: Arena) -> None:
    keys, brief = chain(3), chain(3, seed="brief")
    for each in (keys, brief):
        store(arena, each)
    shard.requests.pin(pin_of(keys))
    shard.requests.pin(pin_of(brief, "brief", until=time.time() + 0.1))
    shard.requests.unpin("p")
    wait_for(lambda: kept(shard) == {})
    wait_for(lambda: not shard.status()["arena"]["leased_blocks"])
    with pytest.raises(ConfigError, match="no pin 'p'"):
        shard.requests.unpin("p")


def test_a_pin_beyond_the_share_is_refused_in_a_sentence(shard: Shard) -> None:
    shard.requests.check_pin(pin_of(chain(ROOM)))
    with pytest.raises(CapacityError, match=r"all pins \(pins\.share\)"):
        shard.requests.check_pin(pin_of(chain(ROOM + 1)))


def test_of_a_pin_beyond_the_share_the_front_stays(shard: Shard, arena: Arena) -> None:
    keys = chain(2 * ROOM)
    store(arena, keys)
    shard.requests.pin(pin_of(keys))
    assert kept(shard) == {"p": ROOM}
    fill(arena)
    assert arena.match(keys) == ROOM


def test_the_name_of_another_owner_s_pin_is_not_to_be_had(shard: Shard) -> None:
    shard.requests.pin(pin_of(chain(3)))
    with pytest.raises(ConfigError, match="a pin of 'me'"):
        shard.requests.check_pin(pin_of(chain(3), owner="you"))
    assert shard.requests.check_pin(pin_of(chain(4))) > time.time() - 60.0


def test_a_lease_that_gets_old_is_renewed_and_nobody_is_warned(
    make_shard: StartShard, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shard = make_shard(lease_warn_s=2.5)
    wait_until_serving(shard)
    with contextlib.closing(open_arena(directory)) as arena:
        keys = chain(ROOM)
        store(arena, keys)
        shard.requests.pin(pin_of(keys))
        time.sleep(4.0)
        assert shard.status()["arena"]["leased_blocks"] == ROOM
    assert "for long" not in caplog.text


def test_pins_outlive_their_shard(make_shard: StartShard, directory: Path) -> None:
    first, keys = make_shard(), chain(ROOM)
    wait_until_serving(first)
    with contextlib.closing(open_arena(directory)) as arena:
        store(arena, keys)
        first.requests.pin(pin_of(keys))
        store(arena, chain(16, seed="earlier"))
        first.stop(retire=False, timeout_s=10)
        for at in range(7):  # almost all that there is
            store(arena, chain(8, seed=f"meanwhile {at}"))
        second = make_shard()
        wait_until_serving(second)
        assert kept(second) == {"p": ROOM}
        fill(arena)
        assert arena.match(keys) == ROOM


@pytest.mark.parametrize("damage", [b"", bytes(30)], ids=["empty", "overwritten"])
def test_a_damaged_file_of_pins_is_left_out_with_a_line_in_the_log(
    make_shard: StartShard, directory: Path, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    first = make_shard()
    wait_until_serving(first)
    first.requests.pin(pin_of(chain(3)))
    first.stop(retire=False, timeout_s=10)
    path = directory / PINS_FILE
    path.write_bytes(damage + path.read_bytes()[len(damage) :][: 40 * len(damage)])
    second = make_shard()
    wait_until_serving(second)
    assert kept(second) == {}
    assert "is left out" in caplog.text


def test_pins_go_with_the_arena(make_shard: StartShard, directory: Path) -> None:
    shard = make_shard()
    wait_until_serving(shard)
    shard.requests.pin(pin_of(chain(3)))
    shard.stop(retire=True, timeout_s=10)
    assert not directory.exists()


def test_a_shard_that_missed_a_pin_or_its_end_hears_of_it_from_another(tier: Tier) -> None:
    keys = chain(3)
    store(tier.nodes["b"].arena, keys)
    tier.a.requests.pin(pin_of(keys))
    wait_for(lambda: kept(tier.b) == {"p": 3})
    tier.a.requests.unpin("p")
    assert [one.keys for one in tier.a.requests.pins({"p": 0.0})] == [b""]
    (gone,) = tier.a.requests.pins({"p": 0.0})
    tier.b.requests.pin(gone)
    wait_for(lambda: kept(tier.b) == {})
