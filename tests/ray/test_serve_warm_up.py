"""An engine that Serve adds on another node is ready when that has what the first one uses."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ray.cluster import open_two_nodes
from tests.ray.served import ask, open_client, serve_run, write_settings
from tests.ray.teller import ROOT, Teller
from tests.ray.test_serve_two_nodes import FOR_ROUTERS, ONE_A_NODE
from tests.waiting import wait_for

pytest.importorskip("ray.serve")

pytestmark = [pytest.mark.ray, pytest.mark.long]


def test_a_new_engine_is_ready_when_its_node_has_what_others_use(tmp_path: Path) -> None:
    with open_two_nodes(FOR_ROUTERS) as nodes:
        environ = {**nodes.machine.environ(), "KVRAY_CONFIG": str(nodes.config_path)}
        settings = tmp_path / "serve.yaml"
        port = write_settings(
            settings,
            engine={**ONE_A_NODE, "num_replicas": 1},
            kvray_config=str(nodes.config_path),
            router="serve",  # which asks both for the same prompt
        )
        with serve_run(settings, port, environ), open_client(port) as client:
            first = ask(client)
            teller = Teller(nodes.config_path, environ)
            try:
                wait_for(lambda: teller.status()["lookup"]["keys"] >= 8, "the announcement")
                _deploy(settings, environ, num_replicas=2)
                wait_for(lambda: _starting(teller.status()), "a warm-up for the second engine")
                (shard,) = _starting(teller.status())
                usage = _usage_at(client, shard["replicas"][0]["replica"])
            finally:
                teller.close()
    assert first.usage.prompt_tokens > 32
    assert shard["warm_up"]["total_bytes"] > 0
    shareable = (first.usage.prompt_tokens - 1) // 32 * 32
    by_source = {"pool": 0, "host": shareable, "disk": 0, "remote": 0}
    assert usage.prompt_tokens_details.cached_tokens_by_source == by_source


def _starting(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the shards whose node was warmed up for an engine that Serve starts."""
    found = [(one, one.get("warm_up")) for one in status["shards"]]
    return [
        one
        for one, warm_up in found
        if warm_up and warm_up["by"].endswith("starts") and warm_up["total_bytes"]
    ]


def _usage_at(client: Any, replica: str) -> Any:
    """Return what the first answer of a replica says of its prompt."""
    found: list[Any] = []

    def has_answered() -> bool:
        raw = ask(client.with_raw_response)
        found[:] = [raw.parse().usage]
        return bool(raw.headers["x-kvray-replica"] == replica)

    wait_for(has_answered, "its first answer")
    return found[0]


def _deploy(settings: Path, environ: dict[str, str], *, num_replicas: int) -> None:
    content = yaml.safe_load(settings.read_text())
    content["applications"][0]["deployments"][0]["num_replicas"] = num_replicas
    settings.write_text(yaml.safe_dump(content))
    serve = str(Path(sys.executable).parent / "serve")
    done = subprocess.run(
        [serve, "run", "--non-blocking", str(settings)],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
