from pathlib import Path

import yaml

from kvray.cli.connector_config import render
from tests.forks import RunKvray

KV_CACHE_CONFIG = {"enable_block_reuse": True, "enable_partial_reuse": False}


def test_configuration_rides_in_the_class_names(tmp_path: Path) -> None:
    path = tmp_path / 'with space and "quotes".yaml'
    options = yaml.safe_load(render(path))
    assert options == {
        "kv_connector_config": {
            "connector_module": "kvray.connector",
            "connector_scheduler_class": f"KvRayScheduler@{path}",
            "connector_worker_class": f"KvRayWorker@{path}",
        },
        "kv_cache_config": KV_CACHE_CONFIG,
    }


def test_relative_path_is_made_absolute() -> None:
    options = yaml.safe_load(render(Path("kvray.yaml")))
    name = options["kv_connector_config"]["connector_worker_class"]
    assert name == f"KvRayWorker@{Path.cwd() / 'kvray.yaml'}"


def test_without_a_file_the_engine_looks_for_its_configuration() -> None:
    options = yaml.safe_load(render(None))
    assert options["kv_connector_config"]["connector_scheduler_class"] == "KvRayScheduler"
    assert options["kv_connector_config"]["connector_worker_class"] == "KvRayWorker"


def test_output_is_what_stdout_would_show(run_kvray: RunKvray, tmp_path: Path) -> None:
    (tmp_path / "kvray.yaml").write_text("cluster_name: prod\n")
    shown = run_kvray("connector-config", "-c", "kvray.yaml")
    written = run_kvray("connector-config", "-c", "kvray.yaml", "-o", "connector.yaml")
    assert (shown.returncode, written.returncode, written.stdout) == (0, 0, "")
    assert (tmp_path / "connector.yaml").read_text() == shown.stdout


def test_output_that_cannot_be_written_is_refused(run_kvray: RunKvray) -> None:
    done = run_kvray("connector-config", "-o", "no/such/dir/connector.yaml")
    assert done.returncode == 2
    assert "cannot be written" in done.stderr
