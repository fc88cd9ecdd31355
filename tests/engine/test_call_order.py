"""The connector is called in TensorRT-LLM's order, with what TensorRT-LLM would say."""

import threading
import traceback
from typing import Any

import pytest

from kvray.connector import base
from kvray.errors import KVRayError
from kvray.reference.engine import ReferenceEngine
from tests.engine import fake_connector
from tests.engine.conftest import BLOCK, MakeEngine, make_prompt
from tests.engine.fake_connector import State
from tests.waiting import wait_for

PASS = ["wait_for_layer_load", "save_kv_layer"] * 2 + ["forward_callable", "wait_for_save"]
META = ["build_connector_meta", "bind_connector_meta", "start_load_kv"]
ITERATION = [*META, *PASS, "get_finished"]
LAST = [*META, *PASS, "request_finished", "get_finished"]
MATCH = ["get_num_new_matched_tokens", "update_state_after_alloc"]


@pytest.fixture
def bring_up(make_faked: MakeEngine, fake: State) -> MakeEngine:
    """Return a maker of engines whose start is not in the record."""

    def make(**options: Any) -> ReferenceEngine:
        engine = make_faked(**options)
        fake.calls.clear()
        return engine

    return make


def settle(engine: ReferenceEngine) -> list[str]:
    """Return the names of all calls up to the poll that ends the last iteration."""
    engine.close()
    return fake_connector.state.names()


def test_start_up_warms_up_before_the_pool_is_registered(make_faked, fake):
    make_faked()
    names = fake.names()
    assert sorted(names[:2]) == ["scheduler", "worker"]
    threads = {call[1] for call in fake.calls[:2]}
    assert threading.main_thread().name not in threads
    assert names[2:] == [
        "register_forward_pass_callable",
        "forward_callable",
        "forward_callable",
        "register_kv_caches",
        "wait_for_initialization",
    ]
    assert fake.calls[3] == ("forward_callable", False, None)


@pytest.mark.parametrize(
    ("overlap", "calls"),
    [
        (False, [*MATCH, *ITERATION, *ITERATION, *LAST]),
        (True, [*MATCH, *ITERATION * 3, "request_finished", "get_finished"]),
    ],
)
def test_one_request_is_reported_pass_by_pass_with_overlap_a_token_late(
    bring_up, fake, overlap, calls
):
    engine = bring_up(overlap=overlap)
    first, second, _ = engine.generate(make_prompt(40), max_tokens=3).token_ids
    assert settle(engine) == calls
    later = [([], 39), ([first], 40)] if overlap else [([first], 40), ([second], 41)]
    assert fake.reports() == [(make_prompt(40), 3, 0, 40), *((new, 0, at, 1) for new, at in later)]


def test_early_end_with_overlap_runs_one_pass_too_many(bring_up, fake):
    engine = bring_up(overlap=True)
    tokens = engine.generate(make_prompt(40), max_tokens=8).token_ids
    fake.calls.clear()
    engine.tokenizer.end_ids = frozenset({tokens[2]})
    output = engine.generate(make_prompt(40), max_tokens=8)
    assert output.finish_reason == "stop"
    assert output.token_ids == tokens[:3]
    names = settle(engine)
    assert names.count("wait_for_save") == 4
    assert names.count("request_finished") == 1


def test_chunked_prefill_reports_everything_first_and_then_moves_on(bring_up, fake):
    engine = bring_up(enable_chunked_prefill=True, chunk_tokens=2 * BLOCK)
    engine.generate(make_prompt(70), max_tokens=1)
    names = settle(engine)
    assert names.count("update_state_after_alloc") == 1
    assert names.count("wait_for_save") == 3
    assert fake.reports() == [(make_prompt(70), 5, 0, 32), ([], 0, 32, 32), ([], 0, 64, 6)]


def test_report_leaves_out_what_is_loaded_for_this_pass(make_faked, bring_up, fake):
    make_faked().generate(make_prompt(40), max_tokens=1)
    engine = bring_up()
    fake.outputs.clear()
    engine.generate(make_prompt(40), max_tokens=1)
    data = fake.outputs[0].new_requests[0]
    assert (data.computed_position, data.num_scheduled_tokens) == (0, 8)


def test_asynchronous_save_holds_the_blocks_until_it_is_reported(bring_up, fake):
    fake.is_async_save, fake.hold = True, threading.Event()
    engine = bring_up(num_blocks=8)
    engine.generate(make_prompt(60), max_tokens=1)
    engine.generate(make_prompt(20, seed=2), max_tokens=1)
    assert engine.cache.get_num_free_blocks() == 8 - 4 - 2
    fake.hold.set()
    engine.generate(make_prompt(20, seed=3), max_tokens=1)
    engine.close()
    assert engine.cache.get_num_free_blocks() == 8
    handed = [call[1] for call in fake.calls if call[0] == "get_finished" and call[1]]
    assert handed == [[1], [2], [3]]


def test_cancelled_request_is_freed_and_never_reported_finished(bring_up, fake):
    engine = bring_up()
    pending = engine.submit(make_prompt(40), max_tokens=900)
    engine.cancel(pending)
    assert pending.result(10).finish_reason == "cancelled"
    engine.generate(make_prompt(5), max_tokens=1)
    assert ("request_finished", 1) not in fake.calls
    assert ("request_finished", 2) in fake.calls
    assert engine.cache.get_num_free_blocks() == 64


def test_main_line_polls_for_a_save_while_it_is_idle(make_faked, fake):
    fake.is_async_save, fake.hold = True, threading.Event()
    engine = make_faked(num_blocks=8, runtime="main")
    engine.generate(make_prompt(60), max_tokens=1)
    fake.hold.set()
    wait_for(lambda: engine.cache.get_num_free_blocks() == 8)


@pytest.mark.parametrize(
    ("offer", "said", "raised_in"),
    [
        ((2 * BLOCK, False), "at least one uncomputed token", "set_prepopulated_prompt_len"),
        ((BLOCK, True), "no loads beside its passes", "get_num_new_matched_tokens"),
    ],
)
def test_an_offer_that_cannot_be_taken_ends_the_engine(make_faked, fake, offer, said, raised_in):
    fake.offer = offer
    engine = make_faked()
    with pytest.raises(KVRayError, match=said):
        engine.generate(make_prompt(2 * BLOCK))
    assert isinstance(engine.failure, KVRayError)
    frames = traceback.extract_tb(engine.failure.__traceback__)
    assert raised_in in {frame.name for frame in frames}
    with pytest.raises(KVRayError, match="dead"):
        engine.submit([1])


@pytest.mark.parametrize("num_tokens", [2 * BLOCK, 40])
def test_offer_is_asked_for_and_ignored_without_block_reuse(make_faked, bring_up, fake, num_tokens):
    make_faked().generate(make_prompt(num_tokens), max_tokens=1)
    engine = bring_up(enable_block_reuse=False)
    output = engine.generate(make_prompt(num_tokens), max_tokens=1)
    assert output.hit_tokens == 0
    assert fake.names()[:2] == MATCH


@pytest.mark.parametrize("name", [*META, "get_finished"])
def test_error_outside_a_pass_ends_the_engine(make_faked, fake, name):
    engine = make_faked()
    pending = [engine.submit(make_prompt(20, seed=seed), max_tokens=500) for seed in (1, 2)]
    fake.raise_in = name
    for item in pending:
        with pytest.raises(KVRayError, match=f"dead.*told to fail in {name}"):
            item.result(10)


@pytest.mark.parametrize("name", ["wait_for_layer_load", "save_kv_layer", "wait_for_save"])
@pytest.mark.parametrize("overlap", [False, True])
def test_error_inside_a_pass_fails_its_requests_and_the_engine_lives(
    make_faked, fake, name, overlap
):
    engine = make_faked(overlap=overlap)
    before = engine.generate(make_prompt(40)).token_ids
    fake.raise_in = name
    with pytest.raises(KVRayError, match=f"forward pass failed.*{name}"):
        engine.generate(make_prompt(40))
    fake.raise_in = ""
    assert engine.generate(make_prompt(40)).token_ids == before
    assert engine.cache.get_num_free_blocks() == 64


def test_id_that_was_never_handed_over_ends_the_engine(make_faked, monkeypatch):
    engine = make_faked()
    assert engine.connector is not None
    monkeypatch.setattr(engine.connector.worker, "get_finished", lambda *_: ([77], []))
    with pytest.raises(KVRayError, match=r"dead.*KeyError"):
        engine.submit([1, 2, 3], max_tokens=500).result(10)


def test_failing_constructor_fails_the_start(make_faked, fake):
    fake.raise_in = "worker"
    with pytest.raises(RuntimeError, match="told to fail in worker"):
        make_faked()


def test_what_a_connector_lacks_of_its_engine_is_named(tmp_path, monkeypatch):
    (tmp_path / "broken_engine.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert base.find_upstream(["no_such_package.inner.connector"]) is None
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        base.find_upstream(["broken_engine"])
