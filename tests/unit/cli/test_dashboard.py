"""`kvray dashboard`: where the dashboard goes, and what is said when it cannot."""

import json
from pathlib import Path

import pytest
import yaml

from tests.forks import RunKvray


def make_session(temp_dir: Path, name: str, dashboards: Path) -> None:
    """Make what Ray's dashboard writes at the start of a session."""
    session = temp_dir / name
    providers = session / "metrics" / "grafana" / "provisioning" / "dashboards"
    providers.mkdir(parents=True)
    described = {"providers": [{"name": "Ray", "options": {"path": str(dashboards)}}]}
    (providers / "default.yml").write_text(yaml.safe_dump(described))
    dashboards.mkdir(parents=True)
    latest = temp_dir / "session_latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(session)


def test_it_goes_into_the_latest_session_again_and_again(
    run_kvray: RunKvray, tmp_path: Path
) -> None:
    ray = tmp_path / "ray"
    for name in ("session_1", "session_2"):
        make_session(ray, name, tmp_path / name)
        for _ in range(2):
            done = run_kvray("dashboard", "install", "--ray-temp-dir", ray)
            assert done.returncode == 0, done.stderr
        assert str(tmp_path / name) in done.stdout
        (path,) = (tmp_path / name).iterdir()
        assert json.loads(path.read_text())["uid"] == "kvray"
    assert "repeat this after a restart" in done.stdout


def test_what_prometheus_needs_is_printed_as_yaml(run_kvray: RunKvray, tmp_path: Path) -> None:
    make_session(tmp_path / "ray", "session_1", tmp_path / "boards")

    done = run_kvray("dashboard", "scrape", "--ray-temp-dir", tmp_path / "ray")

    needed = yaml.safe_load(done.stdout)
    (rules,) = needed["rule_files"]
    assert "KvrayCorruptBlocks" in Path(rules).read_text()
    (job,) = needed["scrape_configs"]
    (files,) = job["file_sd_configs"]
    assert files["files"] == [str(tmp_path / "ray" / "prom_metrics_service_discovery.json")]


def test_any_directory_of_a_grafana_will_do(run_kvray: RunKvray, tmp_path: Path) -> None:
    done = run_kvray("dashboard", "install", "--to", tmp_path)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "kvray_kvray.json").exists()


@pytest.mark.parametrize("command", ["install", "scrape"])
def test_without_a_session_it_says_where_to_run(
    run_kvray: RunKvray, tmp_path: Path, command: str
) -> None:
    done = run_kvray("dashboard", command, "--ray-temp-dir", tmp_path / "none")

    assert done.returncode == 2
    assert "on the node of Ray's head" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_ray_without_its_dashboard_is_named(run_kvray: RunKvray, tmp_path: Path) -> None:
    (tmp_path / "session_latest").mkdir()

    done = run_kvray("dashboard", "install", "--ray-temp-dir", tmp_path)

    assert done.returncode == 2
    assert "--include-dashboard=true" in done.stderr


def test_a_directory_that_cannot_be_written_is_named(run_kvray: RunKvray, tmp_path: Path) -> None:
    done = run_kvray("dashboard", "install", "--to", tmp_path / "absent")

    assert done.returncode == 2
    assert str(tmp_path / "absent") in done.stderr


def test_rules_and_json_can_be_printed(run_kvray: RunKvray) -> None:
    assert "groups:" in run_kvray("dashboard", "rules").stdout
    assert json.loads(run_kvray("dashboard", "show").stdout)["title"] == "kvray"
