"""The files of the examples pass each version's checks, and kvray's own."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from kvray.cli.config import render
from kvray.config import load_config
from kvray.errors import ConfigError
from tests.trtllm.test_start_up import make_halves
from tests.trtllm.version import Version

EXAMPLE = Path(__file__).parents[2] / "examples" / "trtllm_disaggregated"
SERVERS = ("0", "1")


def read(name: str) -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load((EXAMPLE / f"{name}.yaml").read_text())
    return settings


@pytest.mark.parametrize("server", SERVERS)
def test_a_context_server_s_file_ends_with_what_connector_config_writes(server: str) -> None:
    written = (EXAMPLE / f"context-{server}.yaml").read_text()
    assert written.endswith(render(Path(f"/etc/kvray/kvray-{server}.yaml")))


@pytest.mark.parametrize("server", SERVERS)
def test_a_context_server_starts_with_the_connector(version: Version, server: str) -> None:
    settings = read(f"context-{server}")
    version.stand_in.KvCacheConnectorConfig(**settings.pop("kv_connector_config"))
    for half in make_halves(version, **arguments(settings)):
        half.shutdown()


def test_the_generation_server_has_no_connector_and_would_not_start_with_one(
    version: Version,
) -> None:
    settings = read("generation")
    assert "kv_connector_config" not in settings
    with pytest.raises(ConfigError, match="without kv_connector_config"):
        make_halves(version, **arguments(settings))


def test_all_servers_have_an_address() -> None:
    servers = read("disaggregated")
    urls = [servers[kind]["urls"] for kind in ("context_servers", "generation_servers")]
    counts = [servers[kind]["num_instances"] for kind in ("context_servers", "generation_servers")]
    assert [len(each) for each in urls] == counts == [len(SERVERS), 1]
    backends = {
        read(name)["cache_transceiver_config"]["backend"]
        for name in ("context-0", "context-1", "generation")
    }
    assert len(backends) == 1


def arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a file's settings as the arguments that TensorRT-LLM makes of them."""
    settings["cache"] = settings.pop("kv_cache_config", {})
    transfers = SimpleNamespace(**settings["cache_transceiver_config"])
    return {**settings, "cache_transceiver_config": transfers}


SERVE_EXAMPLE = Path(__file__).parents[2] / "examples" / "trtllm_serve"
REPLICAS = ("0", "1")


@pytest.mark.parametrize("replica", REPLICAS)
def test_a_replicas_file_is_what_connector_config_writes(replica: str) -> None:
    written = (SERVE_EXAMPLE / f"replica-{replica}.yaml").read_text()
    assert written == render(Path(f"/etc/kvray/kvray-{replica}.yaml"))


@pytest.mark.parametrize("replica", REPLICAS)
def test_a_replicas_file_passes_the_versions_check_and_names_the_connector(
    version: Version, replica: str
) -> None:
    settings = yaml.safe_load((SERVE_EXAMPLE / f"replica-{replica}.yaml").read_text())
    assert settings["kv_cache_config"] == {
        "enable_block_reuse": True,
        "enable_partial_reuse": False,
    }
    config = version.stand_in.KvCacheConnectorConfig(**settings["kv_connector_config"])
    assert config.connector_module == "kvray.connector"
    for name, base in (
        (config.connector_scheduler_class, version.scheduler_class),
        (config.connector_worker_class, version.worker_class),
    ):
        found = getattr(version.connector, name)
        assert issubclass(found, base)
        assert found.config_path == f"/etc/kvray/kvray-{replica}.yaml"


@pytest.mark.parametrize("replica", REPLICAS)
def test_the_tiers_file_and_a_name_make_a_replicas_configuration(
    tmp_path: Path, replica: str
) -> None:
    tier = (SERVE_EXAMPLE / "kvray.yaml").read_text()
    path = tmp_path / "kvray.yaml"
    path.write_text(f"{tier}connector:\n  replica: replica-{replica}\n")  # as the README does it
    config = load_config(path, environ={})
    assert config.connector.replica == f"replica-{replica}"
    assert config.node_dir == load_config(SERVE_EXAMPLE / "kvray.yaml", environ={}).node_dir
