"""The files of examples/trtllm_disaggregated pass each version's checks, and kvray's own."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from kvray.cli.connector_config import render
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
