"""Requests that wait while their blocks are made ready: resumed, cancelled, resumed too late."""

import time
from typing import Any

import pytest

from kvray.engine.parking import Parking
from kvray.errors import CorruptBlock, LeaseExpired
from tests.trtllm.conftest import MakeEngine, leased
from tests.trtllm.engine import Engine
from tests.trtllm.shapes import BLOCK
from tests.trtllm.version import WITH_GROUPS, Version, on
from tests.unit.connector.test_scheduler import flip_a_byte
from tests.waiting import wait_for

PROMPT = list(range(100, 140))
SHORT_LEASE_S = 0.2


@pytest.fixture(autouse=True)
def _parks(monkeypatch: pytest.MonkeyPatch, environment: Any) -> None:
    monkeypatch.setenv("KVRAY_CONNECTOR__LOAD", "async")
    monkeypatch.setenv("KVRAY_CONNECTOR__PARK_LEASE_S", str(SHORT_LEASE_S))


@pytest.fixture
def warm(make_engine: MakeEngine) -> Engine:
    """A new engine whose tier has PROMPT."""
    cold = make_engine()
    cold.serve(PROMPT, max_new=9)
    cold.close()
    return make_engine()


def test_a_parked_request_comes_back_to_loaded_blocks(warm: Engine) -> None:
    request = warm.submit(PROMPT, max_new=5)
    warm.step()
    assert request.is_parked or request.state == "CONTEXT_INIT"
    assert warm.model.num_passes == 0
    warm.run()
    assert request.num_hit == 36


def test_others_go_on_while_a_request_is_parked(warm: Engine) -> None:
    requests = [warm.submit(PROMPT, max_new=5), warm.submit(list(range(30)), max_new=5)]
    warm.step()
    assert warm.model.num_passes == 1
    warm.run()
    assert [request.num_hit for request in requests] == [36, 0]


def test_what_a_cancelled_request_was_parked_for_is_released_in_time(
    warm: Engine, shard: Any
) -> None:
    victim = warm.submit(PROMPT)
    warm.step()
    assert leased(shard) > 0
    warm.kill(victim)
    wait_for(lambda: serve_another(warm) and leased(shard) == 0, "the end of the parked lease")


def test_a_request_that_comes_back_too_late_stops_the_engine_and_loads_nothing(
    warm: Engine, version: Version, shard: Any
) -> None:
    late = warm.submit(PROMPT)
    warm.step()
    wait_for(lambda: warm.poll_parked(late), "the word that it may go on")
    warm.admission.active.remove(late)  # the engine has others to schedule first
    wait_for(lambda: serve_another(warm) and leased(shard) == 0, "the end of the parked lease")
    warm.admission.active.append(late)
    with pytest.raises(LeaseExpired, match="park_lease_s"):
        warm.run()
    assert warm.totals["loaded_blocks"] == 0


@on(*WITH_GROUPS)
def test_a_request_that_lost_its_blocks_while_parked_is_promised_them_again(
    warm: Engine, shard: Any
) -> None:
    request = warm.submit(PROMPT)
    warm.step()
    wait_for(lambda: warm.poll_parked(request), "the word that it may go on")
    warm.admission.active.remove(request)
    wait_for(lambda: serve_another(warm) and leased(shard) == 0, "the end of the parked lease")
    warm.preempt(request)
    warm.run()
    assert request.num_hit == 36


def test_a_request_that_waits_long_for_its_blocks_keeps_them(
    warm: Engine, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time runs from when the engine was told; before, it has no way to come back."""
    parking = Parking
    verify = parking._verify
    monkeypatch.setattr(
        parking, "_verify", lambda *args: time.sleep(3 * SHORT_LEASE_S) or verify(*args)
    )
    request = warm.submit(PROMPT)
    warm.run()
    assert request.num_hit == 36


def test_what_a_cancelled_request_was_parked_for_is_released_while_the_engine_is_idle(
    warm: Engine, shard: Any
) -> None:
    victim = warm.submit(PROMPT)
    warm.step()
    warm.kill(victim)
    wait_for(lambda: leased(shard) == 0, "the end of the parked lease")


@on("feature_branch")
def test_a_runtime_that_takes_failed_loads_back_computes_them(warm: Engine) -> None:
    def rot(engine: Engine) -> None:
        engine.at.clear()
        flip_a_byte(engine.arena, depth=4)

    warm.at["asked"] = rot
    request = warm.submit(PROMPT, max_new=5)
    while not request.is_ended:
        warm.step()
        for request_id in warm.workers[0].take_failed_async_load_requests():
            assert request_id == request.request_id
            warm.preempt(request)
    assert request.num_hit == 16


@on(*WITH_GROUPS)
@pytest.mark.parametrize("taken", [0, 1, 5])
def test_a_parked_request_may_take_less_than_was_offered(warm: Engine, taken: int) -> None:
    warm.admission.accept = lambda _request, offer: min(offer, taken * BLOCK)
    assert warm.serve(PROMPT, max_new=5).num_hit == taken * BLOCK


def test_a_block_that_rots_while_a_request_is_parked_stops_the_engine(
    warm: Engine, version: Version
) -> None:
    def rot(engine: Engine) -> None:
        engine.at.clear()
        flip_a_byte(engine.arena, depth=4)

    warm.at["asked"] = rot
    warm.submit(PROMPT)
    with pytest.raises(CorruptBlock):
        warm.run()
    assert warm.model.num_passes == 0


def serve_another(engine: Engine) -> bool:
    """Run a pass that has nothing to do with what is parked."""
    time.sleep(SHORT_LEASE_S / 10)
    engine.submit([1, 2, 3])
    engine.step()
    return True
