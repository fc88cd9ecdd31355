"""Faults under a steady load of streams: three engines behind Ray Serve, and a tier.

No request fails but those that a killed engine was answering, and no answer has another token than
an engine alone gives.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence

import psutil
import pytest

from kvray.actors.tier.local_ray import LocalRay
from kvray.errors import KVRayError
from tests.kit.ray.served import Alone, Crowd, Served, crowd_of, end, open_served
from tests.ray.conftest import actor_process, frozen
from tests.waiting import wait_for

pytest.importorskip("ray.serve")

pytestmark = [pytest.mark.ray, pytest.mark.long]

NUM_ENGINES = 3
NUM_CLIENTS = 5
FROZEN_S = 8.0
"""Longer than the dispatcher waits for an engine, shorter than Serve does."""
WAITED_S = 13.0
"""Longer than the dispatcher waits for one choice alone."""
SERVE_DRAINS_S = 20.0
"""So long Serve waits by default for the last answer of a replica that it stops."""
REQUESTS_MAX = 8
SOME = 20
"""Answers that come before a fault strikes, and after it has passed."""
AUTOSCALING = {
    "min_replicas": 1,
    "max_replicas": NUM_ENGINES,
    "target_ongoing_requests": 2,
    "upscale_delay_s": 1.0,
    "downscale_delay_s": 3.0,
    "metrics_interval_s": 0.5,
    "look_back_period_s": 2.0,
}


@pytest.fixture(scope="module")
def served(local: LocalRay) -> Iterator[Served]:
    # Pools that hold less than the prompts have in common: the rest comes from the tier.
    options = {
        "num_blocks": 96,
        "pool_blocks": 96,
        "requests_max": REQUESTS_MAX,
        "drain_timeout_s": 4 * SERVE_DRAINS_S,
    }
    with open_served(local, "faults", num_replicas=NUM_ENGINES, **options) as made:
        yield made


@pytest.fixture(scope="module")
def alone() -> Iterator[Alone]:
    made = Alone()
    yield made
    made.close()


def check(crowd: Crowd, alone: Alone, *, victim: str | None = None) -> None:
    """Check that only what `victim` was answering broke off, with an error that names it."""
    failed = [one for one in crowd.asked if one.error is not None]
    assert [one for one in failed if victim is None or victim not in str(one.error)] == []
    assert victim is None or failed, "the fault met no answer"
    assert len(failed) <= NUM_CLIENTS, "one for each client at most"
    assert alone.wrong(crowd.asked) == []
    assert {one.prompt for one in crowd.asked if one.error is None}, "no answer at all"


def wait_until_whole(served: Served, number: int = NUM_ENGINES) -> None:
    """Wait until so many engines run, and the tier knows them."""

    def is_whole() -> bool:
        with contextlib.suppress(KVRayError):
            return len(served.connected()) == number == len(served.engines())
        return False

    wait_for(is_whole, f"{number} engines that the tier knows")


def only_engine(served: Served) -> psutil.Process:
    """Scale to one engine, and return it."""
    served.deploy(deployment={"num_replicas": 1})
    wait_until_whole(served, 1)
    (engine,) = served.engines()
    return engine


def check_use(crowd: Crowd, since: float) -> None:
    """Check that requests which began since then found blocks in the tier."""
    wait_for(
        lambda: any(one.from_tier for one in crowd.asked if one.began > since),
        "a hit in the tier",
    )


@pytest.mark.parametrize("kind", ["Lookup", "Shard"])
@pytest.mark.parametrize("act", ["kill", "freeze"])
def test_a_part_of_the_tier_that_is_gone_or_silent_fails_no_request(
    served, local, alone, kind, act
):
    wait_until_whole(served)
    with crowd_of(served, NUM_CLIENTS, seed=1) as crowd:
        crowd.wait_for_answers(SOME)
        check_use(crowd, 0.0)
        part = actor_process(local, kind)
        if act == "kill":
            part.kill()
        else:
            freeze(part)
        crowd.wait_for_answers(SOME)
        wait_until_whole(served)
        check_use(crowd, time.monotonic())
    check(crowd, alone)


def freeze(process: psutil.Process, seconds: float = FROZEN_S) -> None:
    with frozen(process):
        time.sleep(seconds)


def test_a_replica_that_stands_still_in_mid_answer_breaks_nothing_off(served, alone):
    replicas = served.replicas_by_name(NUM_ENGINES)
    with crowd_of(served, NUM_CLIENTS, seed=2) as crowd:
        crowd.wait_for_answers(SOME)
        freeze(replicas[crowd.find_busy()])
        crowd.wait_for_answers(SOME)
    check(crowd, alone)
    assert sorted(replicas) == served.connected(), "nobody was replaced"


_ABOVE = ["engine", "keeper", "keeper's parent", "replica"]
"""An engine's process, and those above it."""


@pytest.mark.parametrize("what", _ABOVE)
def test_a_death_breaks_off_the_answers_of_that_engine_and_no_others(served, alone, what):
    found = served.engines_by_name(NUM_ENGINES)
    engines = dict(found)
    with crowd_of(served, NUM_CLIENTS, seed=3) as crowd:
        crowd.wait_for_answers(SOME)
        victim = crowd.find_busy()
        [engines[victim], *engines[victim].parents()][_ABOVE.index(what)].kill()
        crowd.wait_for_answers(SOME)
        wait_for(lambda: victim not in served.connected(), "the victim's end")
        wait_until_whole(served)
        crowd.wait_for_answers(SOME)
    check(crowd, alone, victim=victim)
    assert len(set(served.connected()) & set(engines)) == NUM_ENGINES - 1


def test_engines_go_and_come_by_new_versions_and_by_another_number_where_the_others_stay(
    served, alone
):
    with crowd_of(served, NUM_CLIENTS, seed=4) as crowd:
        for number in (1, NUM_ENGINES):
            before = served.connected()
            served.deploy(num_replicas=number)
            wait_for(lambda old=before: not set(served.connected()) & set(old), "other engines")
            wait_until_whole(served, number)
            crowd.wait_for_answers(SOME)
        known = served.connected()
        for number in (1, NUM_ENGINES, 1):
            served.deploy(deployment={"num_replicas": number})
            wait_until_whole(served, number)
            assert set(served.connected()) & set(known)
            known = served.connected()
            crowd.wait_for_answers(SOME)
    check(crowd, alone)


def test_requests_that_wait_long_for_an_engine_get_one_and_so_do_later_ones(served, alone):
    engine = only_engine(served)
    with crowd_of(served, REQUESTS_MAX + NUM_CLIENTS, seed=6) as crowd:
        crowd.wait_for_answers(SOME)
        freeze(engine, WAITED_S)
        crowd.wait_for_answers(5 * SOME)
    check(crowd, alone)


def test_an_ingress_that_is_replaced_gives_its_answers_to_the_end(served, alone):
    engine = only_engine(served)
    with crowd_of(served, REQUESTS_MAX, seed=9) as crowd:
        crowd.wait_for_answers(SOME)
        with frozen(engine):
            served.deploy(queued_max=100)  # another argument: a new version of ingress and engine
            time.sleep(SERVE_DRAINS_S + 5)
        crowd.wait_for_answers(SOME)
    check(crowd, alone)


def test_engines_come_with_the_load_and_go_with_it(served, alone):
    with crowd_of(served, 1, seed=7) as few:
        served.deploy(deployment={"autoscaling_config": AUTOSCALING})
        wait_until_whole(served, 1)
        with crowd_of(served, 3 * NUM_CLIENTS, seed=8) as many:
            wait_until_whole(served, NUM_ENGINES)
            many.wait_for_answers(SOME)
        wait_until_whole(served, 1)
        few.wait_for_answers(SOME)
    check(few, alone)
    check(many, alone)


def test_the_end_leaves_nothing(served, local):
    end(served.serve)
    wait_for(lambda: not served.engines(), "the engines' end")
    wait_for(lambda: not _of_serve(local), "the end of Serve's actors")
    served.shell.say("down", **served.environ)
    assert not served.config.node_dir.exists()


def _of_serve(local: LocalRay) -> Sequence[psutil.Process]:
    family = psutil.Process(local.pid).children(recursive=True)
    found = []
    for process in family:
        with contextlib.suppress(psutil.Error):
            if "".join(process.cmdline()[:1]).startswith(("ray::Serve", "ray::Proxy")):
                found.append(process)
    return found
