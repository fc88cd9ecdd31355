"""The scheduler's half alone: it needs of vLLM the names of three classes, and what vLLM asks."""

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub import constants

from kvray.config import KVRayConfig
from kvray.engine.prefix_finder import PrefillRate
from kvray.engine.shared_state import shared_state_for
from kvray.errors import ConfigError
from kvray.vllm.held import Hold, Holds
from tests.kit.apart import BLOCK
from tests.kit.connector import HIT, PROMPT
from tests.unit.vllm.conftest import ROOM, MakeHalf
from tests.unit.vllm.test_read import cache_config
from tests.unit.vllm.test_read import request as request_of

if TYPE_CHECKING:
    from kvray.vllm.scheduling import SchedulingHalf


@pytest.fixture
def half(make_half: MakeHalf) -> "SchedulingHalf":
    return make_half()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which stands still."""
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def asked(name: str, tokens: list[int] = PROMPT, **changes: Any) -> SimpleNamespace:
    return request_of(request_id=name, prompt_token_ids=tokens, all_token_ids=tokens, **changes)


def nothing(**scheduled: Any) -> SimpleNamespace:
    """Return a pass that has no request, but for what is `scheduled`."""
    cached = SimpleNamespace(
        req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
    )
    fields = {"scheduled_new_reqs": [], "scheduled_cached_reqs": cached}
    return SimpleNamespace(**{**fields, "num_scheduled_tokens": {}, **scheduled})


def told(half: "SchedulingHalf") -> Hold:
    """Return what the ranks are told to hold with the next pass."""
    (hold,) = half.plan(nothing()).holds
    return hold


def answer(half: "SchedulingHalf", hold: Hold, valid: int | None = None) -> None:
    """Have the rank answer."""
    from kvray.vllm.start import HoldAnswers

    num_valid = hold.num_blocks if valid is None else valid
    half.take_answers(HoldAnswers(Counter({hold.hold_id: 1}), {hold.hold_id: num_valid}))


def offered(
    half: "SchedulingHalf", request: SimpleNamespace, computed: int = 0, *, valid: int | None = None
) -> int | None:
    """Ask, have the rank hold `valid` blocks of what is leased, and ask again."""
    assert half.match(request, computed) is None
    answer(half, told(half), valid)
    return half.match(request, computed)


def taken(half: "SchedulingHalf", request: SimpleNamespace, hit: int, at: int | None = None) -> Any:
    """Have vLLM take so many tokens; return the pass that computes the rest behind `at`."""
    half.allocated(request, hit)
    name, computed = request.request_id, hit if at is None else at
    data = SimpleNamespace(req_id=name, block_ids=(list(range(10)),), num_computed_tokens=computed)
    num_scheduled = {name: len(request.all_token_ids) - computed}
    return half.plan(nothing(scheduled_new_reqs=[data], num_scheduled_tokens=num_scheduled))


def totals(half: "SchedulingHalf") -> Counter[str]:
    return half._leader.shared.figures.totals


def test_ranks_on_several_nodes_or_heard_through_another_connector_are_refused(half):
    from kvray.vllm.start import PoolMetadata

    identity = half._leader.shared.identity
    ranks = {n: PoolMetadata(identity=identity, hold_blocks=ROOM, host="ab"[n]) for n in (0, 1)}
    with pytest.raises(ConfigError, match=r"several nodes \(a, b\)"):
        half.lead(ranks)
    with pytest.raises(ConfigError, match="MultiConnector"):
        half.lead({0: SimpleNamespace()})


def test_replicas_share_no_blocks_if_the_cpu_of_one_packs_them_otherwise(scheduling, monkeypatch):
    from kvray.vllm.start import _device

    found = []
    for has_amx in (True, False):
        monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda is_so=has_amx: is_so)
        config = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"))
        found.append(_device(config))
    assert found[0] != found[1]
    assert _device(SimpleNamespace(device_config=SimpleNamespace(device_type="cuda"))) == "cuda"


@pytest.fixture
def args_of(scheduling: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Read the arguments of a vLLM with such fields."""
    from kvray.vllm.start import read_args

    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.32.0", raising=False)

    def args(load_format: str = "auto", model_weights: str = "", **fields: Any) -> Any:
        said = SimpleNamespace(**fields)
        envs = SimpleNamespace(VLLM_ENABLE_V1_MULTIPROCESSING=True, **fields)
        monkeypatch.setattr(sys.modules["vllm"], "envs", envs, raising=False)
        found = {"model": "nowhere", "hf_config_path": tmp_path, "model_weights": model_weights}
        config = SimpleNamespace(
            model_config=SimpleNamespace(**{**found, "multimodal_config": said, **fields}),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=0),
            device_config=SimpleNamespace(device_type="cuda"),
            load_config=SimpleNamespace(load_format=load_format),
            attention_config=said,
        )
        return read_args(config, cache_config())

    return args


@pytest.mark.parametrize(
    "change",
    [
        {"video_pruning_method": "vidcom2"},  # it keeps other tokens of a video, and as many
        {"mm_encoder_attn_dtype": "fp8"},
        {"VLLM_HUMMING_ONLINE_QUANT_CONFIG": {"dtype": "int4"}},
        {"code_revision": "v2"},  # of code that a checkpoint names and does not have
        {"backend_per_kind": {"full_attention": "B12X"}},  # it has keys before values
    ],
)
def test_replicas_that_compute_or_keep_otherwise_share_no_blocks(
    args_of, tmp_path, monkeypatch, change
):
    def names(**fields: Any) -> tuple[str, str]:
        found = args_of(**fields)
        return found.overrides, found.attention_backend

    before = names()
    assert names(**change) == names(**change) != before
    (tmp_path / "config.json").write_text('{"rope_theta": 5e5}')
    assert before != names() == names()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    fetched = tmp_path / "models--org--base" / "snapshots" / "v1"
    fetched.mkdir(parents=True)
    on_hub = {"hf_config_path": "org/base", "revision": "v1"}
    before = names(**on_hub)
    (fetched / "config.json").write_text('{"rope_theta": 5e5}')
    assert before != names(**on_hub) == names(**on_hub)


def test_weights_that_are_not_read_from_the_checkpoint_need_a_name(args_of):
    for fields in ({"load_format": "ipc_cache"}, {"model_weights": "/elsewhere"}):
        with pytest.raises(ConfigError, match=r"connector\.model_key"):
            shared_state_for(object(), args_of(**fields), KVRayConfig())
    assert args_of().weights_from == args_of("sharded_state").weights_from == ""


def test_what_vllm_takes_is_loaded_and_after_a_preemption_is_no_hit_of_the_answer(half):
    request = asked("a")
    for _ in range(4):
        assert offered(half, request) == HIT
        passed = taken(half, request, HIT)
        (load,) = passed.loads
        assert (load.skip, load.pages.ids().tolist()) == (0, list(range(HIT // BLOCK)))
        assert passed.meta.loads == passed.drops == ()
        assert half._holds.room == ROOM
    assert half.finish("a") == (False, HIT)


def test_nothing_is_offered_before_every_rank_has_answered(half):
    request = asked("a")
    assert [half.match(request, 0) for _ in range(3)] == [None] * 3
    hold = told(half)
    assert half.match(request, 0) is None
    answer(half, hold)
    assert [half.match(request, 0) for _ in range(3)] == [HIT] * 3  # as often as vLLM has no room
    assert totals(half)["requests"] == 0
    assert half.plan(nothing()).holds == ()


def test_what_vllm_does_not_take_is_not_loaded(half):
    request = asked("a")
    assert offered(half, request) == HIT
    passed = taken(half, request, 0)
    assert (passed.loads, passed.drops) == ((), (0,))
    assert half.finish("a") == (False, 0)


@pytest.mark.parametrize("valid", [0, 3])
def test_a_block_that_proves_wrong_makes_a_shorter_hit_or_a_miss(half, valid):
    request = asked("a")
    assert offered(half, request, valid=valid) == valid * BLOCK
    passed = taken(half, request, valid * BLOCK)
    assert [load.pages.num_blocks for load in passed.loads] == [valid] * bool(valid)
    assert [(save.depth, save.pages[0].num_blocks) for save in passed.meta.saves] == [
        (valid, len(PROMPT) // BLOCK - valid)
    ]
    assert totals(half)["hit_tokens"] == valid * BLOCK
    assert totals(half)["miss_tokens_corrupt"] == HIT - valid * BLOCK
    assert half.finish("a") == (False, valid * BLOCK)


def test_what_vllm_has_itself_by_then_is_passed_over(half):
    request = asked("a")
    assert offered(half, request, BLOCK) == HIT - BLOCK
    assert half.match(request, 4 * BLOCK) == HIT - 4 * BLOCK
    assert half.match(request, 3 * BLOCK) == HIT - 3 * BLOCK
    (load,) = taken(half, request, HIT - 3 * BLOCK, HIT).loads
    assert (load.skip, load.pages.ids().tolist()) == (2, list(range(3, HIT // BLOCK)))
    assert totals(half)["local_tokens"] == 3 * BLOCK
    assert totals(half)["hit_tokens"] == HIT - 3 * BLOCK


def test_nothing_is_offered_where_vllm_has_all_of_a_hold_by_now(half):
    request = asked("a")
    assert offered(half, request, BLOCK) == HIT - BLOCK
    assert half.match(request, HIT + BLOCK) == 0
    assert taken(half, request, 0, HIT + BLOCK).drops == (0,)


def test_what_vllm_has_lost_of_its_own_before_a_hold_is_held_as_well(half):
    request = asked("a")
    assert half.match(request, 2 * BLOCK) is None
    assert offered(half, request, BLOCK) == HIT - BLOCK
    assert offered(half, request, 0) == HIT
    assert len(taken(half, request, HIT).loads) == 1
    assert half._holds.room == ROOM


def test_a_request_whose_own_blocks_go_again_and_again_is_computed_at_last(half, now):
    request = asked("a")
    assert half.match(request, 2 * BLOCK) is None
    now[0] += 60
    answer(half, told(half))
    assert half.match(request, BLOCK) == 0
    assert taken(half, request, 0, BLOCK).drops == (0,)


def test_no_more_is_held_than_the_ranks_have_memory_for(half):
    half._holds = Holds(num_ranks=1, num_blocks=4)
    assert offered(half, asked("a")) == 4 * BLOCK
    taken(half, asked("a"), 4 * BLOCK)
    assert totals(half)["miss_tokens_hold_full"] == HIT - 4 * BLOCK, "they are in the tier"


def test_a_request_waits_for_memory_for_a_bounded_time(half, now):
    half._holds = Holds(num_ranks=1, num_blocks=HIT // BLOCK)
    first, second = asked("a"), asked("b")
    assert offered(half, first) == HIT
    assert [half.match(second, 0) for _ in range(2)] == [None] * 2
    now[0] += 1.01 * half._leader.shared.config.connector.stage_wait_s
    assert half.match(second, 0) == 0
    half.allocated(second, 0)
    assert totals(half)["miss_tokens_hold_full"] == HIT
    half.finish("a")  # nobody waits for it any more
    assert offered(half, second) == HIT


def test_requests_that_come_at_once_wait_for_memory_while_computing_would_take_longer(
    half, now, monkeypatch
):
    monkeypatch.setattr(PrefillRate, "tokens_per_s", HIT / 2.0)
    half._holds = Holds(num_ranks=1, num_blocks=HIT // BLOCK)
    waiting, hits = [asked(name) for name in "abcdefgh"], []
    for _ in range(30):
        now[0] += 0.1  # a pass
        for request in list(waiting):
            hit = half.match(request, 0)
            if hit is not None:
                hits.append(hit)
                waiting.remove(request)
                taken(half, request, hit)
        for hold in half.plan(nothing()).holds:
            answer(half, hold)
    assert hits == [HIT] * 8


def test_a_rank_that_does_not_answer_costs_a_hit_and_no_request(half, now):
    request = asked("a")
    assert half.match(request, 0) is None
    hold = told(half)
    now[0] += 60
    assert half.match(request, 0) == 0
    assert taken(half, request, 0).drops == (hold.hold_id,)
    assert totals(half)["miss_tokens_too_slow"] == HIT
    assert half._holds.room < ROOM  # it may copy still
    answer(half, hold)
    assert half._holds.room == ROOM


@pytest.mark.parametrize("is_told", [False, True])
def test_a_request_that_ends_while_it_waits_is_let_go(half, is_told):
    assert half.match(asked("a"), 0) is None
    if is_told:
        answer(half, told(half))
    assert half.finish("a") == (False, 0)
    passed = half.plan(nothing())
    assert (passed.holds, passed.drops) == ((), (0,) if is_told else ())
    assert half._holds.room == ROOM
    arena = half._leader.shared.link.arena
    assert arena is not None
    assert arena.stats()["leased_blocks"] == 0


@pytest.mark.parametrize("waits", [False, True], ids=["later", "within each pass"])
def test_blocks_on_a_device_are_kept_until_the_ranks_have_read_them(half, waits):
    shared = half._leader.shared
    shared.identity = replace(shared.identity, is_host=False)
    shared.args = replace(shared.args, has_writes_aside=waits)
    for name, num_tokens, num_saves in (("a", 40, 1), ("b", 3, 0)):  # not a block
        request = asked(name, list(range(num_tokens)))
        assert half.match(request, 0) == 0
        passed = taken(half, request, 0)
        is_kept = bool(num_saves) and not waits
        assert (len(passed.meta.saves), passed.names) == (num_saves, {0: "a"} if is_kept else {})
        assert half.finish(name) == (is_kept, 0)


def test_after_a_reset_nothing_is_loaded_or_saved_until_a_version_is_named(half):
    shared = half._leader.shared
    assert offered(half, asked("a")) == HIT
    half.reset()
    request = asked("c")
    assert half.match(request, 0) == 0
    passed = taken(half, request, 0)
    assert (passed.loads, passed.meta.saves, passed.drops) == ((), (), (0,))
    assert totals(half)["miss_tokens_weights_unnamed"] == HIT
    shared.name_weights("2")
    assert half.match(asked("d"), 0) == 0
    half.reset()
    shared.name_weights("")
    assert offered(half, asked("e")) == HIT


def test_what_follows_blocks_of_the_weights_before_in_vllm_s_cache_is_not_saved(half, caplog):
    """A reset that does nothing while blocks are in use is answered with false, no more."""
    shared, pool = half._leader.shared, SimpleNamespace(cached_block_hash_to_block={})
    half.watch(pool)
    half.plan(nothing())

    def saves(name: str, computed: int) -> int:
        request = asked(name, [ord(name), *PROMPT])
        assert half.match(request, computed) == 0
        return len(taken(half, request, 0, computed).meta.saves)

    assert saves("a", 4) == 1
    half.reset()
    assert saves("b", 4) == 0
    shared.name_weights("2")
    assert [saves("c", 0), saves("d", 4), saves("e", 4)] == [1, 0, 0]
    assert "version ''" in caplog.text
    pool.cached_block_hash_to_block = {}  # now it is done
    assert saves("f", 4) == 1


def test_what_was_held_of_the_weights_before_is_not_promised(half):
    """A client names other weights while the ranks copy, and again once they hold it."""
    request, shared = asked("a"), half._leader.shared
    assert half.match(request, 0) is None
    shared.name_weights("2")
    answer(half, told(half))
    assert half.match(request, 0) == 0
    shared.name_weights("")
    assert half.match(asked("b"), 0) is None
    answer(half, told(half))
    shared.name_weights("3")
    assert half.match(asked("b"), 0) == 0
