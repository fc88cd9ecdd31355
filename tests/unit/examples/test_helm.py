"""The Helm chart: what follows from its values, and what it says of wrong ones.

`test_kuberay` checks what it renders as it checks the manifests.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvray.actors.shard.settings import ShardSettings
from kvray.config import load_config
from kvray.config.values import parse_size
from tests import helm

KUBERAY = Path(__file__).parents[3] / "examples" / "kuberay"
IMAGE = "registry.example.com/trtllm-ray:1"
LIKE = {
    "raycluster.yaml": {
        "nodes": {"maxReplicas": 8, "nodeSelector": None},
        "worker": {"memory": "76Gi"},
        "kvray": {"nvme": None},
    },
    "hostpath.yaml": {
        "arena": {"place": "host"},
        "disk": {"hostPath": "/mnt/nvme/kvray"},
        "kvray": {"arena": {"capacity": "256GiB"}, "nvme": {"capacity": "1TiB"}},
        "nodes": {"minReplicas": 0},
        "worker": {"memory": "280Gi"},
        "engine": {"gpus": 4},
    },
}
"""The values for which the chart gives a manifest of `examples/kuberay`."""


def plain(text: str) -> list[dict[str, Any]]:
    """Return the objects of a file, with kvray.yaml as data."""
    objects = [one for one in yaml.safe_load_all(text) if one is not None]
    for one in objects:
        one["metadata"].pop("labels", None)  # the chart has Helm's own there
        if one["kind"] == "ConfigMap":
            one["data"] = {name: yaml.safe_load(file) for name, file in one["data"].items()}
    return sorted(objects, key=lambda one: str(one["kind"]))


@pytest.mark.parametrize("name", LIKE)
def test_the_chart_gives_the_manifests_of_kuberay(name: str) -> None:
    images = {"tier": IMAGE, "engine": IMAGE, "pullPolicy": ""}
    rendered = helm.render({**LIKE[name], "images": images, "auth": {"secret": "kvray-auth"}})
    text = "---\n".join(one for file, one in rendered.items() if file.endswith(".yaml"))
    assert plain(text) == plain((KUBERAY / name).read_text())


def worker(values: dict[str, Any]) -> dict[str, Any]:
    """Return the spec of a Ray worker's pod."""
    cluster = yaml.safe_load(helm.render(values)["raycluster.yaml"])
    (group,) = cluster["spec"]["workerGroupSpecs"]
    spec: dict[str, Any] = group["template"]["spec"]
    return spec


@pytest.mark.parametrize(
    "arena",
    [
        {"capacity": "1GiB"},
        {"capacity": "100GiB", "slot_min": "4KiB"},
        {"capacity": "68719476736"},
        {"capacity": "1.5TiB", "slot_min": "1MiB"},
    ],
    ids=str,
)
def test_volume_and_memory_follow_from_any_arena(arena: dict[str, str], tmp_path: Path) -> None:
    pod = worker({"kvray": {"arena": arena}})
    path = tmp_path / "kvray.yaml"
    path.write_text(json.dumps({"arena": arena}))
    needed = ShardSettings.of(load_config(path, environ={})).spec.geometry().file_bytes
    (limit,) = (
        parse_size(one["emptyDir"]["sizeLimit"] + "B")
        for one in pod["volumes"]
        if one["name"] == "kvray"
    )
    assert needed <= limit <= 1.05 * needed + 2**31
    memory = parse_size(pod["containers"][0]["resources"]["limits"]["memory"] + "B")
    assert needed + 4 * 2**30 <= 0.95 * memory <= 1.05 * needed + 6 * 2**30


def test_a_given_limit_that_is_large_enough_stays() -> None:
    pod = worker({"worker": {"memory": "96Gi"}})
    assert pod["containers"][0]["resources"]["limits"]["memory"] == "96Gi"


@pytest.mark.parametrize(("flush_s", "grace"), [(0, 60), (90.5, 151)])
def test_a_pod_ends_after_the_flush(flush_s: float, grace: int) -> None:
    pod = worker({"kvray": {"nvme": {"flush_s": flush_s}}})
    assert pod["terminationGracePeriodSeconds"] == grace


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"arena": {"place": "disk"}}, "at '/arena/place': value must be one of 'pod', 'host'"),
        ({"wrker": {}}, "at '': additional properties 'wrker' not allowed"),
        ({"engine": {"gpus": "8"}}, "at '/engine/gpus': got string, want integer"),
        (
            {"kvray": {"staging": {"stage_wait": 1}}},
            "at '/kvray/staging': additional properties 'stage_wait' not allowed",
        ),
        (
            {"kvray": {"arena": {"dir": "/dev/shm"}}},
            "The chart sets arena.dir itself; leave kvray.arena.dir out of the values.",
        ),
        (
            {"worker": {"memory": "64Gi"}},
            "worker.memory 64Gi is too little for an arena of 64GiB beside Ray's object store of"
            " 1GiB and 3GiB of processes; leave it out, write at least 72Gi, or lower"
            " kvray.arena.capacity.",
        ),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_in_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(helm.Refused) as refused:
        helm.render(values)
    *_, said = str(refused.value).splitlines()
    assert said.endswith(sentence)


def test_the_chart_knows_every_setting_of_kvray_yaml() -> None:
    schema = json.loads(helm.SCHEMA.read_text())["$defs"]["config"]
    assert schema == helm.config_schema(), "run `python -m tests.unit.config.settings_table`"


def test_a_token_is_made_unless_a_secret_is_named() -> None:
    def tokens(values: dict[str, Any]) -> list[str]:
        objects = yaml.safe_load_all(helm.render(values)["config.yaml"])
        return [one["data"]["auth_token"] for one in objects if one["kind"] == "Secret"]

    (one,), (other,) = tokens({}), tokens({})
    assert one != other
    assert tokens({"auth": {"secret": "ours"}}) == []


def test_the_notes_name_figures_and_commands() -> None:
    notes = helm.render({})["NOTES.txt"]
    assert "72Gi of memory" in notes
    assert "kvray status" in notes


def test_helm_finds_no_fault_in_the_chart() -> None:
    assert helm.lint() == []
