"""How each version finds, constructs and configures a connector, and what is refused then."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from kvray.errors import ConfigError
from tests.trtllm.conftest import MakeEngine
from tests.trtllm.shapes import BLOCK, MLA
from tests.trtllm.version import WITH_GROUPS, Version, on

PAGE = Path(__file__).parents[2] / "docs" / "tensorrt_llm.md"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "pipeline parallelism": ({"pipeline_parallel_size": 2}, "pipeline_parallel_size to 1"),
    "context parallelism": ({"context_parallel_size": 2}, "context_parallel_size to 1"),
    "beam search": ({"max_beam_width": 4}, "max_beam_width to 1"),
    "speculative decoding": ({"speculative_config": object()}, "unset speculative_config"),
    "own host cache": ({"cache": {"host_cache_size": 2**30}}, "unset kv_cache_config.host_cache"),
    "FP4 cache": ({"cache": {"dtype": "nvfp4"}}, "kv_cache_config.dtype to fp8"),
    "VANILLA attention": ({"attn_backend": "VANILLA"}, "set attn_backend to TRTLLM"),
    "Ray orchestrator with ranks": (
        {"orchestrator_type": "ray", "num_ranks": 2},
        "unset orchestrator_type",
    ),
}
REFUSED_BY_LAYER_GROUPS: dict[str, tuple[dict[str, Any], str]] = {
    "own disk cache": ({"cache": {"disk_cache_size": 2**30}}, "unset kv_cache_config.disk_cache"),
    "scratch pages": (
        {"cache": {"enable_swa_scratch_reuse": True}},
        "kv_cache_config.enable_swa_scratch_reuse to false",
    ),
    "compressed cache": (
        {"kv_cache_compression_config": object()},
        "unset kv_cache_compression_config",
    ),
}
EVICTS = SimpleNamespace(capacity_scheduler_policy="MAX_UTILIZATION")


def make_halves(version: Version, *, num_ranks: int = 1, **changes: Any) -> tuple[Any, Any]:
    """Construct both halves as an executor does: at once, each in a thread of its own."""
    cache = {"tokens_per_block": BLOCK, **changes.pop("cache", {})}
    args = version.stand_in.llm_args(num_ranks=num_ranks, rank=0, cache=cache, **changes)
    with version.rank(0), ThreadPoolExecutor(2) as threads:
        halves = [version.worker_class, version.scheduler_class]
        worker, scheduler = [threads.submit(half, args) for half in halves]
        return worker.result(), scheduler.result()


def test_halves_are_subclasses_of_the_version_s_own_and_constructed_at_once(
    version: Version, shard: Any
) -> None:
    worker, scheduler = make_halves(version)
    assert isinstance(worker, version.stand_in.KvCacheConnectorWorker)
    assert isinstance(scheduler, version.stand_in.KvCacheConnectorScheduler)
    assert worker._rank.shared is scheduler._shared
    scheduler.shutdown()
    worker.shutdown()


def test_classes_are_found_by_the_names_of_the_page(version: Version) -> None:
    """The page's settings pass the version's own check, and its names lead to our classes."""
    for block in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL):
        settings = yaml.safe_load(block)
        config = version.stand_in.KvCacheConnectorConfig(**settings["kv_connector_config"])
        assert config.connector_module == "kvray.connector"
        found = getattr(version.connector, config.connector_worker_class)
        assert issubclass(found, version.worker_class)
        assert issubclass(
            getattr(version.connector, config.connector_scheduler_class), version.scheduler_class
        )
        assert settings["kv_cache_config"] == {
            "enable_block_reuse": True,
            "enable_partial_reuse": False,
        }
        _, _, path = config.connector_worker_class.partition("@")
        assert found.config_path == (path or None)


def test_settings_of_our_own_would_not_pass_the_version_s_check(version: Version) -> None:
    with pytest.raises(ValidationError):
        version.stand_in.KvCacheConnectorConfig(
            connector_module="kvray.connector",
            connector_scheduler_class="KvRayScheduler",
            connector_worker_class="KvRayWorker",
            kvray_config="/etc/kvray/kvray.yaml",
        )


@pytest.mark.parametrize("what", REFUSED)
def test_set_ups_that_a_connector_serves_wrongly_are_refused(version: Version, what: str) -> None:
    changes, cure = REFUSED[what]
    with pytest.raises(ConfigError, match=cure):
        make_halves(version, **changes)


@on(*WITH_GROUPS)
@pytest.mark.parametrize("what", REFUSED_BY_LAYER_GROUPS)
def test_set_ups_of_the_second_cache_manager_are_refused(version: Version, what: str) -> None:
    changes, cure = REFUSED_BY_LAYER_GROUPS[what]
    with pytest.raises(ConfigError, match=cure):
        make_halves(version, **changes)


def test_several_windows_and_evictions_are_refused_where_one_pool_is_handed_over(
    version: Version,
) -> None:
    several = {"max_attention_window": [128, 4096]}
    for changes in ({"cache": several}, {"scheduler_config": EVICTS}):
        if version.stand_in.HAS_GROUPS:
            worker, scheduler = make_halves(version, **changes)
            scheduler.shutdown()
            worker.shutdown()
            continue
        with pytest.raises(ConfigError, match="first cache manager"):
            make_halves(version, **changes)


def test_attention_dp_is_refused_where_rank_0_is_asked_alone(version: Version) -> None:
    changes = {"enable_attention_dp": True, "num_ranks": 2}
    if hasattr(version.stand_in.KvCacheConnectorWorker, "supports_attention_dp"):
        assert version.worker_class.supports_attention_dp is True
        assert version.scheduler_class.supports_attention_dp is True
        return
    with pytest.raises(ConfigError, match="unset enable_attention_dp"):
        make_halves(version, **changes)


@pytest.mark.parametrize("shape", [(8, 2, 64), (8, 2, 3, 64)], ids=str)
def test_a_pool_that_is_not_the_whole_cache_is_refused(
    version: Version, shard: Any, shape: tuple[int, ...]
) -> None:
    worker, scheduler = make_halves(version)
    pool = version.module("model.read_layout").torch.zeros(shape)
    try:
        with pytest.raises(ConfigError, match="kvray serves pools"):
            worker.register_kv_caches(pool)
    finally:
        scheduler.shutdown()
        worker.shutdown()


def test_a_warm_up_before_the_pool_is_there_does_nothing(make_engine: MakeEngine) -> None:
    """Every engine of these tests warms up so; see `warm_up`."""
    assert make_engine(shape=MLA).serve([1, 2, 3], max_new=3).num_hit == 0


def test_without_a_tier_an_engine_serves_on(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRAY_CLUSTER_NAME", "nowhere")
    engine = make_engine(waits_for_tier=False)
    assert engine.serve(list(range(30)), max_new=5).num_hit == 0
    assert engine.totals["miss_tokens_store_down"] > 0


def test_prefix_reservations_are_offered_by_neither_half(version: Version) -> None:
    """A branch refuses to start with a connector that has some of the methods and not all."""
    for half in (version.scheduler_class, version.worker_class):
        for name in ("reserve_prefix", "release_prefix_reservation", "get_finished_prefix_loads"):
            assert name not in vars(half)
