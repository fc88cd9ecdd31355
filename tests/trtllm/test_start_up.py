"""How each version finds, constructs and configures a connector, and what is refused then."""

import importlib
import re
import runpy
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from kvray.cli.config import render
from kvray.config import load_config
from kvray.errors import ConfigError
from tests.trtllm.memory import FLAT, MLA, Memory
from tests.trtllm.version import WITH_GROUPS, Version, on

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tensorrt_llm.md"
SERVE = ROOT / "examples" / "trtllm_serve"
DISAGGREGATED = ROOT / "examples" / "trtllm_disaggregated"
TWO = pytest.mark.parametrize("number", ["0", "1"])
"""Replicas or context servers of an example."""
V2 = "use_kv_cache_manager_v2"
REUSE = {"enable_block_reuse": True, "enable_partial_reuse": False}


def drafts(kind: str) -> dict[str, Any]:
    return {"speculative_config": SimpleNamespace(decoding_type=kind, max_draft_len=3)}


def sends(**transfers: Any) -> dict[str, Any]:
    return {"cache_transceiver_config": SimpleNamespace(**transfers)}


DRAFT_LAYERS = (
    *("MTP", "Eagle", "Eagle3", "Draft_Target", "PARD", "SA", "DFlash", "DSpark"),
    *("User_Provided", "SaveState", "Medusa", "Lookahead", "", "a kind of tomorrow"),
)
SENDS = sends(backend="DEFAULT")
NO_OVERLAP = {"disable_overlap_scheduler": True}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("pipeline_parallel_size to 1", {"pipeline_parallel_size": 2}),
    ("context_parallel_size to 1", {"context_parallel_size": 2}),
    ("max_beam_width to 1", {"max_beam_width": 4}),
    ("unset sleep_config", {"sleep_config": object()}),
    ("unset speculative_config", {"speculative_config": object()}),
    *[("unset speculative_config", drafts(kind)) for kind in DRAFT_LAYERS],
    ("unset kv_cache_config.host_cache", {"cache": {"host_cache_size": 2**30}}),
    ("kv_cache_config.dtype to fp8", {"cache": {"dtype": "nvfp4"}}),
    ("set attn_backend to TRTLLM", {"attn_backend": "VANILLA"}),
    ("unset orchestrator_type", {"orchestrator_type": "ray", "num_ranks": 2}),
    ("without kv_connector_config", SENDS),
    ("without kv_connector_config", SENDS | {"disable_overlap_scheduler": None}),
    (
        "enable_pipelined_transfer to false",
        {**sends(backend="DEFAULT", enable_pipelined_transfer=True), **NO_OVERLAP},
    ),
]
REFUSED_BY_LAYER_GROUPS: list[tuple[str, dict[str, Any]]] = [
    ("unset kv_cache_config.disk_cache", {"cache": {"disk_cache_size": 2**30}}),
    ("enable_swa_scratch_reuse to false", {"cache": {"enable_swa_scratch_reuse": True}}),
    ("unset kv_cache_compression_config", {"kv_cache_compression_config": object()}),
    *[
        ("use_kv_cache_manager_v2 to false", drafts("NGram") | {"cache": {V2: switch}})
        for switch in (True, "auto")
    ],
]
SERVED = [
    drafts("NGram") | {"cache": {V2: False}},
    drafts("AUTO") | {"cache": {V2: False}},
    sends(backend=None, enable_pipelined_transfer=True),
]


def test_halves_are_subclasses_of_the_version_s_own_and_constructed_at_once(version, shard):
    with version.halves() as (worker, scheduler):
        assert isinstance(worker, version.KvCacheConnectorWorker)
        assert isinstance(scheduler, version.KvCacheConnectorScheduler)
        assert worker._rank.shared is scheduler._shared


def halves_named_by(version: Version, config: Any) -> tuple[Any, Any]:
    """Return the worker and the scheduler as TensorRT-LLM finds them."""
    module = importlib.import_module(config.connector_module)
    assert module is version.connector
    names = config.connector_worker_class, config.connector_scheduler_class
    return getattr(module, names[0]), getattr(module, names[1])


def check_settings(version: Version, text: str) -> Any:
    """Check that settings pass the version's own check and name our classes; return the path."""
    settings = yaml.safe_load(text)
    assert settings["kv_cache_config"] == REUSE
    config = version.KvCacheConnectorConfig(**settings["kv_connector_config"])
    worker, scheduler = halves_named_by(version, config)
    assert issubclass(worker, version.worker_class)
    assert issubclass(scheduler, version.scheduler_class)
    _, _, path = config.connector_worker_class.partition("@")
    assert worker.config_path == scheduler.config_path == (path or None)
    return worker.config_path


def test_classes_are_found_by_the_names_of_the_page(version):
    for block in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL):
        check_settings(version, block)


@TWO
def test_a_replicas_file_is_what_connector_config_writes_and_names_the_connector(version, number):
    written = (SERVE / f"replica-{number}.yaml").read_text()
    path = f"/etc/kvray/kvray-{number}.yaml"
    assert written == render(Path(path))
    assert check_settings(version, written) == path


@TWO
def test_the_tiers_file_and_a_name_make_a_replicas_configuration(tmp_path, number):
    tier = (SERVE / "kvray.yaml").read_text()
    path = tmp_path / "kvray.yaml"
    path.write_text(f"{tier}connector:\n  replica: replica-{number}\n")  # as the README does it
    config = load_config(path, environ={})
    assert config.connector.replica == f"replica-{number}"
    assert config.node_dir == load_config(SERVE / "kvray.yaml", environ={}).node_dir


@on(*WITH_GROUPS)
def test_the_entry_for_a_registry_and_server_url_are_all_that_a_preset_needs(
    version, shard, tmp_path
):
    path = tmp_path / "kvray.yaml"
    path.write_text("connector: {replica: blue}\n")
    entry = runpy.run_path(str(SERVE / "registry_entry.py"))["ENTRY"]
    (block,) = re.findall(
        r"```yaml\n(.*?)```", (ROOT / "docs" / "preset.md").read_text(), re.DOTALL
    )
    written = yaml.safe_load(block)["kv_connector_config"]
    written["server_url"] = written["server_url"].replace("/etc/kvray/kvray.yaml", str(path))
    config = version.KvCacheConnectorConfig(**written, **entry[written["connector"]])
    assert halves_named_by(version, config) == (version.worker_class, version.scheduler_class)
    with version.halves(kv_connector_config=config) as (worker, scheduler):
        assert worker._rank.shared.replica == scheduler._shared.replica == "blue"


@pytest.mark.parametrize(("cure", "changes"), REFUSED + REFUSED_BY_LAYER_GROUPS)
def test_set_ups_that_a_connector_serves_wrongly_are_refused(version, cure, changes):
    if (cure, changes) in REFUSED_BY_LAYER_GROUPS and not version.has_groups:
        pytest.skip("this version has no second cache manager")
    with pytest.raises(ConfigError, match=cure) as refused:
        version.construct(**changes)
    assert re.fullmatch(r"(?!.*\. ).*\.", str(refused.value)), "one sentence"


@pytest.mark.parametrize("changes", SERVED)
def test_set_ups_beside_them_are_served(version, changes):
    version.start(**changes)


def test_several_windows_and_evictions_are_refused_where_one_pool_is_handed_over(version):
    evicts = SimpleNamespace(capacity_scheduler_policy="MAX_UTILIZATION")
    several = {"max_attention_window": [128, 4096]}
    for changes in ({"cache": several}, {"scheduler_config": evicts}):
        refusal = pytest.raises(ConfigError, match="first cache manager")
        with nullcontext() if version.has_groups else refusal:
            version.start(**changes)


@pytest.mark.parametrize("max_seq_len", [None, 8, 9])
def test_one_window_with_one_pool_is_refused_where_the_engine_ends_once_it_passes_a_block(
    version, shard, max_seq_len
):
    refusal = pytest.raises(ConfigError, match=r"unset kv_cache_config\.max_attention_window")
    is_refused = version.has_hashes and max_seq_len != 8
    settings = {"cache": {"max_attention_window": [8]}, "max_seq_len": max_seq_len}
    with version.halves(**settings) as (worker, _), refusal if is_refused else nullcontext():
        worker.register_kv_caches(Memory(FLAT, num_pages=8).pool())


def test_attention_dp_is_refused_where_rank_0_is_asked_alone(version, monkeypatch):
    """1.3.0rc29 and 1.4.0rc1 are as main without it."""
    if hasattr(version.KvCacheConnectorWorker, "supports_attention_dp"):
        assert version.worker_class.supports_attention_dp is True
        assert version.scheduler_class.supports_attention_dp is True
        for half in ("KvCacheConnectorWorker", "KvCacheConnectorScheduler"):
            monkeypatch.delattr(version.exports[half], "supports_attention_dp")
    with pytest.raises(ConfigError, match="unset enable_attention_dp"):
        version.construct(enable_attention_dp=True, num_ranks=2)


def test_a_warm_up_before_the_pool_is_there_does_nothing(make_engine):
    """Every engine of these tests warms up so; see `warm_up`."""
    assert make_engine(shape=MLA).serve([1, 2, 3], max_new=3).num_hit == 0


def test_without_a_tier_an_engine_serves_on(make_engine, monkeypatch):
    monkeypatch.setenv("KVRAY_CLUSTER_NAME", "nowhere")
    engine = make_engine(waits_for_tier=False)
    assert engine.serve(list(range(30)), max_new=5).num_hit == 0
    assert engine.totals["miss_tokens_store_down"] > 0


@TWO
def test_a_context_server_s_file_ends_with_what_connector_config_writes_and_starts(version, number):
    written = (DISAGGREGATED / f"context-{number}.yaml").read_text()
    assert written.endswith(render(Path(f"/etc/kvray/kvray-{number}.yaml")))
    settings = yaml.safe_load(written)
    version.KvCacheConnectorConfig(**settings.pop("kv_connector_config"))
    refusal = pytest.raises(ConfigError, match="one page to two requests")
    with refusal if version.name == "v1_2" else nullcontext():
        version.start(**arguments(settings))


@on("v1_3rc", "main_line")
def test_context_servers_with_partial_reuse_are_refused_where_pages_get_two_owners(version):
    settings = arguments(read("context-0"))
    settings["cache"] = {**settings["cache"], "enable_partial_reuse": True}
    refusal = pytest.raises(ConfigError, match="enable_partial_reuse to false")
    with refusal if version.name == "v1_3rc" else nullcontext():
        version.start(**settings)


def test_the_generation_server_has_no_connector_and_would_not_start_with_one(version):
    settings = read("generation")
    assert "kv_connector_config" not in settings
    with pytest.raises(ConfigError, match="without kv_connector_config"):
        version.construct(**arguments(settings))


def test_all_servers_have_an_address():
    servers = read("disaggregated")
    kinds = [servers["context_servers"], servers["generation_servers"]]
    assert [len(each["urls"]) for each in kinds] == [each["num_instances"] for each in kinds]
    assert [each["num_instances"] for each in kinds] == [2, 1]
    settings = [read(name) for name in ("context-0", "context-1", "generation")]
    assert len({each["cache_transceiver_config"]["backend"] for each in settings}) == 1


def read(name: str) -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load((DISAGGREGATED / f"{name}.yaml").read_text())
    return settings


def arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a file's settings as the arguments that TensorRT-LLM makes of them."""
    settings["cache"] = settings.pop("kv_cache_config", {})
    return {**settings, **sends(**settings["cache_transceiver_config"])}
