"""The files of examples/trtllm_serve pass each version's checks and lead to the connector."""

from pathlib import Path

import pytest
import yaml

from kvray.cli.connector_config import render
from kvray.config import load_config
from tests.trtllm.version import Version

EXAMPLE = Path(__file__).parents[2] / "examples" / "trtllm_serve"
REPLICAS = ("0", "1")


@pytest.mark.parametrize("replica", REPLICAS)
def test_a_replicas_file_is_what_connector_config_writes(replica: str) -> None:
    written = (EXAMPLE / f"replica-{replica}.yaml").read_text()
    assert written == render(Path(f"/etc/kvray/kvray-{replica}.yaml"))


@pytest.mark.parametrize("replica", REPLICAS)
def test_a_replicas_file_passes_the_versions_check_and_names_the_connector(
    version: Version, replica: str
) -> None:
    settings = yaml.safe_load((EXAMPLE / f"replica-{replica}.yaml").read_text())
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
    tier = (EXAMPLE / "kvray.yaml").read_text()
    path = tmp_path / "kvray.yaml"
    path.write_text(f"{tier}connector:\n  replica: replica-{replica}\n")  # as the README does it
    config = load_config(path, environ={})
    assert config.connector.replica == f"replica-{replica}"
    assert config.node_dir == load_config(EXAMPLE / "kvray.yaml", environ={}).node_dir
