"""Faults and prompts of a run, which follow from a seed, and the verdict on it."""

import math
import signal
import subprocess
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from kvray.config import load_config
from kvray.lab.chaos import judge, load, machine
from kvray.lab.chaos.faults import Campaign, NotNow, NotYet
from kvray.lab.chaos.schedule import KINDS, Fault, draw_settings, make_schedule
from kvray.lab.chaos.servers import Served, Server
from tests.unit.lab.demo.test_demo import make_output

TICK_S = 0.125
ENDS_S = 100.0


class World:
    """A clock, requests in flight, and faults that strike unless told otherwise."""

    def __init__(self, *schedule: Fault, out_of_reach: int = -1) -> None:
        self.now = 1000.0
        self.in_flight = judge.IN_FLIGHT_MIN
        self.out_of_reach = out_of_reach
        self.error: type[NotNow] = NotNow
        self.told: list[tuple[str, int, float]] = []
        ways = (self.strike, self.end, lambda: self.in_flight)
        self.campaign = Campaign(schedule, *ways, ends_s=ENDS_S, now=lambda: self.now)

    def strike(self, fault: Fault) -> None:
        if fault.number == self.out_of_reach:
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


def test_a_fault_strikes_at_its_time_and_is_taken_back_at_its_end():
    world = World(fault(0, 1.0, lasts_s=2.0), fault(1, 2.0, lasts_s=0.5))
    world.go_on_until(4.0)
    assert world.told == [("strike", 0, 1.0), ("strike", 1, 2.0), ("end", 1, 2.5), ("end", 0, 3.0)]
    assert world.skipped() == [None, None]


def test_a_fault_that_waits_holds_up_no_other_and_lasts_as_long_as_it_was_to():
    world = World(fault(0, 1.0, lasts_s=2.0), fault(1, 2.0), out_of_reach=0)
    world.go_on_until(5.0)
    assert [one[:2] for one in world.told] == [("strike", 1), ("end", 1)]
    world.out_of_reach = -1
    world.go_on_until(10.0)
    assert world.told[2:] == [("strike", 0, 5.0), ("end", 0, 7.0)]


def test_a_fault_waits_for_requests_in_flight():
    world = World(fault(0, 1.0))
    world.in_flight = judge.IN_FLIGHT_MIN - 1
    world.go_on_until(3.0)
    assert not world.told
    world.in_flight = judge.IN_FLIGHT_MIN
    world.go_on_until(4.0)
    assert world.told[0] == ("strike", 0, 3.0)
    assert world.campaign.strikes[0].in_flight == judge.IN_FLIGHT_MIN


def test_a_fault_that_waited_too_long_is_given_up_and_taken_back_later_if_it_has_begun():
    world = World(fault(0, 1.0, lasts_s=2.0), out_of_reach=0)
    world.go_on_until(NotNow.patience_s + 5.0)
    assert world.told == [("end", 0, NotNow.patience_s + 1.0)]
    assert world.skipped() == ["It is not running."]
    world = World(fault(0, 1.0, lasts_s=2.0), out_of_reach=0)
    world.error = NotYet
    world.go_on_until(NotNow.patience_s + 5.0)
    assert not world.told
    world.out_of_reach = -1
    world.go_on_until(NotNow.patience_s + 10.0)
    assert [one[:2] for one in world.told] == [("strike", 0), ("end", 0)]


def test_nothing_strikes_or_lasts_when_the_campaign_is_over():
    world = World(fault(0, ENDS_S - 2.0, lasts_s=9.0), fault(1, ENDS_S - 1.0), out_of_reach=1)
    world.go_on_until(ENDS_S + 5.0)
    assert world.told == [("strike", 0, ENDS_S - 2.0), ("end", 0, ENDS_S), ("end", 1, ENDS_S)]
    assert world.skipped() == [None, "It is not running."]


def schedule(seed: int = 1, **changes: Any) -> list[Fault]:
    usual = {"duration_s": 600.0, "gap_s": 2.0, "kinds": KINDS, "num_nodes": 1}
    return make_schedule(seed=seed, quiet_s=20.0, **{**usual, **changes})


def test_ten_minutes_have_two_hundred_faults_of_every_kind_alike_by_the_seed_and_a_quiet_end():
    faults = schedule()
    assert faults == schedule() != schedule(4)
    assert len(faults) >= 200
    counts = Counter(fault.kind for fault in faults)
    assert counts.keys() == {kind.name for kind in KINDS}
    assert max(counts.values()) - min(counts.values()) <= 1
    assert [fault.strikes_s for fault in faults] == sorted(fault.strikes_s for fault in faults)
    assert faults[0].strikes_s >= 10
    lasts: dict[str, list[float]] = defaultdict(list)
    for fault in faults:
        assert fault.strikes_s <= fault.ends_s <= 580
        assert 0 <= fault.choice < 1
        lasts[fault.kind].append(fault.ends_s - fault.strikes_s)
    assert max(lasts["stop_shard"]) > 10, "some stops outlast every deadline"
    assert min(lasts["stop_shard"]) < 3
    assert {*lasts["kill_shard"]} == {0.0}


def test_cables_of_all_nodes_are_pulled_one_by_one_and_put_back_in_other_orders():
    (kind,) = (kind for kind in KINDS if kind.strikes_all)
    faults = schedule(kinds=[kind], num_nodes=3, gap_s=20.0)
    groups = [faults[at : at + 3] for at in range(0, len(faults), 3)]
    assert 20 < len(groups) < 40, "one kind alone is repeated"
    for group in groups:
        assert {fault.kind for fault in group} == {kind.name}
        assert {int(fault.choice * 3) for fault in group} == {0, 1, 2}
        assert group[-1].strikes_s - group[0].strikes_s <= 1
    ends = [[fault.ends_s for fault in group] for group in groups]
    assert len({tuple(np.argsort(one)) for one in ends}) > 1


def test_settings_are_drawn_by_the_seed_and_can_be_used(tmp_path):
    drawn = [draw_settings(seed) for seed in range(30)]
    assert drawn[:5] == [draw_settings(seed) for seed in range(5)]
    path = tmp_path / "kvray.yaml"
    for settings in drawn:
        nvme = {"dir": str(tmp_path), **settings["nvme"]}
        path.write_text(yaml.safe_dump({**settings, "nvme": nvme}))
        load_config(path)
    for section, name in (("arena", "policy"), ("lookup", "partitions"), ("nvme", "admission")):
        assert len({settings[section][name] for settings in drawn}) > 1


def test_an_engine_that_is_stopped_is_not_stopped_again():
    server: Any = object.__new__(Server)
    process = subprocess.Popen(["sleep", "60"])
    server.replica, server.stops = SimpleNamespace(is_alive=True, pid=process.pid), []
    server.in_flight = 1
    try:
        assert server.send(signal.SIGSTOP) == process.pid
        assert server.send(signal.SIGSTOP) is None
        server.resume(process.pid)
        assert len(server.stops) == 1
        assert server.stops[0][1] < math.inf
    finally:
        process.kill()
        process.wait()


def served(began: float, hits: int, replica: str = "one", **changes: int) -> Served:
    known: dict[str, Any] = {"replica": replica, "place": 0, "wrong_tokens": 0}
    known |= {"began": began, "ended": began + 1.0}
    known["outputs"] = [make_output(prompt_tokens=100, hit_tokens=hits)]
    return Served(**known | changes)


def strike(began: float, ended: float, **changes: Any) -> judge.Strike:
    known = {"kind": "kill_shard", "began": began, "ended": ended, "in_flight": 12}
    return judge.Strike(**known | changes)


CALM = [served(at, 80) for at in range(10)]


def found_of(**results: Any) -> dict[str, Any]:
    """Return the report of a run beside a calm one."""
    return dict(judge.report(judge.Results(**results), judge.Results(served=CALM)))


@pytest.mark.parametrize(
    ("ended", "under_fire", "recovery_s"),
    [
        (1.5, [(0, 80), (1, 0), (2, 10), (3, 60), (4, 80)], 2.5),
        (0.5, [(1, 80), (2, 80), (1, 0, "two"), (5, 80, "two")], 5.5),
        (1.5, [(at, 10) for at in range(20)], 18.5),
    ],
    ids=["a good batch that began after the end", "of the slowest replica", "until the end"],
)
def test_hits_are_back_with_the_first_good_batch_of_all_replicas(ended, under_fire, recovery_s):
    answers, struck = [served(*one) for one in under_fire], [strike(0.5, ended)]
    assert judge.recoveries(struck, answers, CALM) == [recovery_s]
    found = found_of(served=answers, strikes=struck)
    assert found["recovery_s_last"] == pytest.approx(recovery_s)


def test_a_batch_of_new_documents_is_no_sign_of_a_loss_nor_of_its_end():
    calm = [served(0, 0, place=0), served(1, 80, place=1)]
    under_fire = [served(1, 0, place=0), served(2, 70, place=1)]
    assert judge.recoveries([strike(0.5, 0.5)], under_fire, calm) == [2.5]
    assert np.isnan(judge.recoveries([strike(0.5, 0.5)], under_fire[:1], calm)).all()


def test_a_fault_that_was_not_over_when_the_next_struck_is_not_counted():
    under_fire = [served(at, 0) for at in range(5)] + [served(5, 80)]
    first, last = judge.recoveries([strike(0.5, 1.0), strike(2.0, 3.0)], under_fire, CALM)
    assert np.isnan(first)
    assert last == 3.0


def test_what_did_not_strike_is_told_and_not_counted():
    strikes = [strike(1, 1), strike(2, 2, kind="truncate", skipped="No mover")]
    found = found_of(served=CALM[:5], strikes=strikes)
    assert found["faults_injected"] == 1
    assert found["faults"] == {"kill_shard": 1}
    told = {"struck": 0, "skipped": {"No mover": 1}, "in_flight_min": None, "recovery_s_max": None}
    assert found["by_kind"]["truncate"] == told
    whole = {**found, "skipped_kinds": {}, "settings": draw_settings(0)}
    assert judge.chaos_report(whole).parts[0].row_count == 2


def test_a_loss_that_was_not_injected_and_a_wrong_token_fail_the_run():
    found = found_of(losses=Counter(injected_deaths=2, injected_requests=24))
    assert judge.has_passed(found)
    assert found["requests_lost_to_injected_deaths"] == 24
    for loss in ("engine_deaths", "hung_requests", "failed_requests", "unsettled_nodes"):
        assert not judge.has_passed(found_of(losses=Counter({loss: 1}))), loss
    assert not judge.has_passed(found_of(served=[served(0, 80, wrong_tokens=1)]))


def test_answers_on_nodes_that_joined_are_judged_and_kept_apart():
    found = found_of(served=[served(0, 40)], joined=[served(0, 20, wrong_tokens=1)])
    assert (found["wrong_tokens"], found["requests"]) == (1, 2)
    assert found["hit_tokens_ratio"] == pytest.approx(0.5)
    assert found["joined"] == {"requests": 1, "hit_share": 0.2}


def test_stalls_do_not_count_the_wait_for_a_core():
    calls = [[0.0, 0.0, 0.010, 0.008]] * 99 + [[1.0, 0.0, 0.003, 0.0]]
    assert judge.stall_p99_ms(np.array(calls)) == pytest.approx(3.0)
    assert judge.stall_p99_ms(np.empty((0, 4))) == 0.0


REPLICAS = 2


def workload(seed: int = 1) -> list[load.Phase]:
    return load.make_workload(seed=seed, num_phases=3, num_replicas=REPLICAS)


def batches(replica: int, count: int, seed: int = 1) -> list[load.Batch]:
    made = load.batches_of(workload(), replica=replica, num_replicas=REPLICAS, seed=seed)
    return list(islice(made, count))


def truth() -> load.Answers:
    return {ask: (5, 6, 7) for asks in load.all_asks(workload()) for ask in asks}


def test_replicas_share_some_documents_and_keep_others_to_themselves():
    phases, ours = workload(), range(REPLICAS)
    shared = {one.number for phase in phases for about in phase.shared for one in about}
    private = [{one.number for phase in phases for one in phase.private[own]} for own in ours]
    asked = [
        {ask.conversation for batch in batches(own, 200) for ask in batch.asks} for own in ours
    ]
    assert asked[0] & asked[1] == shared
    assert [one - shared for one in asked] == private
    read = batches(0, 3 * load.BATCHES + 1)
    assert read[0].place == read[-1].place == 0, "phases come round again"
    own = {one.number for one in (*phases[0].shared[0], *phases[0].private[0])}
    for batch in (read[0], read[-1]):
        assert own & {ask.conversation for ask in batch.asks}


def test_equal_seeds_ask_the_same_and_a_batch_nothing_twice():
    assert workload(2) == workload(2)
    assert workload(2) != workload(3)
    assert batches(0, 60) == batches(0, 60)
    assert batches(0, 60) != batches(0, 60, seed=2)
    for batch in batches(0, 60):
        assert len(set(batch.asks)) == len(batch.asks) == 12


def test_a_turn_begins_with_all_before_it_and_fits_and_documents_differ_from_their_first_block_on():
    conversations, answers = load.conversations_of(workload()), truth()
    for number, one in conversations.items():
        first, second, last = (load.prompt_of(one, turn, answers) for turn in range(3))
        assert first[: len(one.document)] == one.document
        assert second[: len(first) + 3] == (*first, *answers[load.Ask(number, 0)])
        assert len(last) <= load.PROMPT_TOKENS_MAX
    documents = {one.document for one in conversations.values()}
    assert len({one[: load.TOKENS_PER_BLOCK] for one in documents}) == len(documents)


def test_a_machine_whose_cleanup_hangs_waits_for_no_process_of_its_network(monkeypatch):
    monkeypatch.setattr(machine, "_CLOSE_TIMEOUT_S", 0.01)
    made = object.__new__(machine.Machine)
    made._cleanup = subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE)
    made._holders = [subprocess.Popen(["sleep", "60"])]
    made._described = []
    made.close()
    assert made._holders[0].returncode == -signal.SIGKILL
