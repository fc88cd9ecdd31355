"""The KubeRay manifests and the Helm chart: what the schemas of Kubernetes and Helm say of them."""

import json
import os
import shlex
import signal
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from kvray import __version__
from kvray.actors.shard.settings import ShardSettings
from kvray.cli.app import app
from kvray.cli.config import render
from kvray.config import WELL_KNOWN_PATH, KVRayConfig, load_config, parse_size
from kvray.dashboards import ALERTS, package_file
from tests import helm
from tests.waiting import HANG_S, wait_for

EXAMPLE = Path(__file__).parents[3] / "examples" / "kuberay"
CHART: dict[str, Any] = yaml.safe_load("""
raycluster.yaml:
  nodes: {maxReplicas: 8, nodeSelector: null}
  worker: {memory: 76Gi}
  kvray: {nvme: null}
  images: &images {tier: &image "registry.example.com/trtllm-ray:1", engine: *image, pullPolicy: ""}
  auth: &auth {secret: kvray-auth}
hostpath.yaml:
  arena: {place: host}
  disk: {hostPath: /mnt/nvme/kvray}
  kvray: {arena: {capacity: 256GiB}, nvme: {capacity: 1TiB}}
  nodes: {minReplicas: 0}
  worker: {memory: 280Gi}
  engine: {gpus: 4}
  images: *images
  auth: *auth
default: {arena: {place: pod}}
host:
  arena: {place: host}
  disk: {hostPath: /mnt/nvme/kvray}
  kvray: {arena: {capacity: 256GiB}, nvme: {flush_s: 300}}
  worker: {rdmaResource: rdma/hca_shared_devices_a}
  images: {pullSecrets: [registry]}
  engine: {gpus: 4, args: [--max_batch_size, "64"]}
""")
"""Values of the chart; of the first two it gives the manifests in `examples/kuberay`."""
PODS = ("raycluster.yaml", "default")
"""Those that have engine and Ray worker in one pod."""
KUBERNETES = "1.30"
POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
RAY_SHARE = 0.95
"""Of a container's memory: Ray's own RAY_memory_usage_threshold."""
PROCESSES = 3 * 2**30
RAY_CLUSTER = yaml.safe_load((Path(__file__).parent / "raycluster_v1.yaml").read_text())


@cache
def text(name: str) -> str:
    files = helm.render(CHART[name]).items()
    return "---\n".join(one for file, one in files if file.endswith(".yaml"))


def manifests(name: str) -> list[dict[str, Any]]:
    return [dict(one) for one in yaml.safe_load_all(text(name)) if one is not None]


def one_of(name: str, kind: str) -> dict[str, Any]:
    (found,) = (one for one in manifests(name) if one["kind"] == kind)
    return found


def worker_group(name: str) -> dict[str, Any]:
    (group,) = one_of(name, "RayCluster")["spec"]["workerGroupSpecs"]
    return dict(group)


def templates(name: str) -> dict[str, dict[str, Any]]:
    """Return the pod templates of a file: of the head, the worker, and a Deployment's engine."""
    head = one_of(name, "RayCluster")["spec"]["headGroupSpec"]
    found = {"head": head["template"], "worker": worker_group(name)["template"]}
    for one in manifests(name):
        if one["kind"] == "Deployment":
            found["engine"] = one["spec"]["template"]
    return found


def containers(name: str) -> dict[str, dict[str, Any]]:
    return {
        container["name"]: container
        for template in templates(name).values()
        for container in template["spec"]["containers"]
    }


def tier(name: str, tmp_path: Path) -> KVRayConfig:
    return loaded(one_of(name, "ConfigMap")["data"]["kvray.yaml"], tmp_path)


def loaded(text: str, tmp_path: Path) -> KVRayConfig:
    (tmp_path / "kvray.yaml").write_text(text)
    return load_config(tmp_path / "kvray.yaml", environ={})


def arena_bytes(config: KVRayConfig) -> int:
    return ShardSettings.of(config).spec.geometry().file_bytes


def size(quantity: str) -> int:
    return parse_size(quantity + "B" if quantity.endswith("i") else quantity)


each_manifest = pytest.mark.parametrize("name", CHART)


@each_manifest
def test_the_schemas_of_kubernetes_and_kuberay_take_every_object_and_pod(name):
    objects = [one for one in manifests(name) if one["kind"] != "RayCluster"]
    for template in templates(name).values():
        metadata = {"name": "pod", **template.get("metadata", {})}
        objects.append({**POD, "metadata": metadata, "spec": template["spec"]})
    for one in objects:
        kubernetes_validate.validate(one, KUBERNETES, strict=True)
    jsonschema.validate(one_of(name, "RayCluster"), RAY_CLUSTER)
    group = worker_group(name)
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


@each_manifest
def test_pods_on_nodes_with_gpus_tolerate_their_taint_and_an_engine_uses_all_that_it_has(name):
    engine = containers(name)["engine"]
    tp_size = engine["args"][engine["args"].index("--tp_size") + 1]
    assert tp_size == engine["resources"]["limits"]["nvidia.com/gpu"]
    found = templates(name)
    taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert "tolerations" not in found.pop("head")["spec"]
    assert all(template["spec"]["tolerations"] == [taint] for template in found.values())


@each_manifest
def test_nodes_with_a_shard_have_its_resource_its_memory_and_the_time_to_write_to_disk(
    name, tmp_path
):
    config, parameters = tier(name, tmp_path), worker_group(name)["rayStartParams"]
    (given,) = shlex.split(parameters["resources"])
    assert yaml.safe_load(given) == {config.shard.resource: 1}
    pod = templates(name)["worker"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= config.nvme.flush_s + 30
    limit = size(containers(name)["ray-worker"]["resources"]["limits"]["memory"])
    needed = arena_bytes(config) + int(parameters["object-store-memory"]) + PROCESSES
    assert needed <= RAY_SHARE * limit
    assert limit <= 1.15 * needed, "no memory is kept for nothing"
    if name in PODS:
        assert arena_bytes(config) <= memory_volume(pod) <= 1.05 * arena_bytes(config)


def memory_volume(pod: dict[str, Any]) -> int:
    (limit,) = (one["emptyDir"]["sizeLimit"] for one in pod["volumes"] if one["name"] == "kvray")
    return size(limit)


@each_manifest
def test_engine_and_shard_share_the_arena_as_one_user(name, tmp_path):
    arena_dir = str(tier(name, tmp_path).arena.dir)
    backing, users = [], []
    for template in templates(name).values():
        users.append(template["spec"]["securityContext"])
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        for container in template["spec"]["containers"]:
            if container["name"] in ("ray-worker", "engine"):
                volume = volumes[mounts(container)[arena_dir]]
                backing.append(volume.get("hostPath", {}).get("path") or volume)
    one, other = backing
    assert one == other
    assert all(user == users[0] for user in users)


def mounts(container: dict[str, Any]) -> dict[str, str]:
    return {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}


@each_manifest
def test_probes_and_hooks_run_commands_that_there_are(name):
    probe = containers(name)["ray-worker"]["startupProbe"]
    program, command, *options = probe["exec"]["command"]
    assert program == "kvray"
    done = CliRunner().invoke(app, [command, *options], env={"KVRAY_CLUSTER_NAME": "nowhere"})
    assert (done.exit_code, "did not answer" in done.output) == (1, True)
    assert float(options[options.index("--timeout") + 1]) < probe["timeoutSeconds"]
    hook = containers(name)["ray-head"]["lifecycle"]["postStart"]["exec"]["command"][2]
    assert "kvray up --no-wait" in hook


def test_a_rollout_of_engines_has_not_failed_before_one_could_start():
    deployment = one_of("hostpath.yaml", "Deployment")["spec"]
    probe = containers("hostpath.yaml")["engine"]["startupProbe"]
    starts_s = probe["periodSeconds"] * probe["failureThreshold"]
    assert deployment.get("progressDeadlineSeconds", 600) > starts_s


FAKE_RAY = """\
#!/usr/bin/env bash
printf '%s\\n' "$@" '--' >>"$STARTS"
[[ $(grep -c -- '^--$' "$STARTS") -gt 1 ]] || exit 1
trap 'exit 0' TERM
while :; do sleep 0.05; done
"""


@pytest.mark.parametrize("name", PODS)
def test_a_ray_that_ends_is_restarted_in_its_container_and_does_not_take_the_engine_down(
    name, tmp_path
):
    """A pod is ready when all its containers are."""
    worker = containers(name)["ray-worker"]
    for probe in ("readinessProbe", "livenessProbe"):  # else KubeRay puts its own there
        assert worker[probe]["exec"]["command"] == ["true"]
    metadata = templates(name)["worker"]["metadata"]
    assert metadata["annotations"] == {"ray.io/overwrite-container-cmd": "true"}
    (tmp_path / "ray").write_text(FAKE_RAY)
    (tmp_path / "ray").chmod(0o755)
    resources = worker_group(name)["rayStartParams"]["resources"]
    (starts := tmp_path / "starts").touch()
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "STARTS": str(starts)}
    environ["KUBERAY_GEN_RAY_START_CMD"] = f"ray start --resources={resources} --block"
    command = [*worker["command"], *worker["args"]]
    with subprocess.Popen(command, env={**os.environ, **environ}) as container:
        try:
            started = ["start", '--resources={"kvray_shard": 1}', "--block", "--"] * 2
            wait_for(lambda: starts.read_text().splitlines() == started, "a second start")
            container.send_signal(signal.SIGTERM)
            assert container.wait(HANG_S) == 0
        finally:
            container.kill()


@each_manifest
def test_every_container_finds_the_configuration_and_a_ray_the_token_of_a_secret(name):
    data = one_of(name, "ConfigMap")["data"]
    assert WELL_KNOWN_PATH.name in data
    assert yaml.safe_load(data["connector.yaml"]) == yaml.safe_load(render(WELL_KNOWN_PATH))
    for container in containers(name).values():
        assert mounts(container)[str(WELL_KNOWN_PATH.parent)] == "config"
        if container["name"].startswith("ray-"):
            environ = {one["name"]: one for one in container["env"]}
            assert environ["RAY_AUTH_MODE"]["value"] == "token"
            secret = environ["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
            assert secret == {"name": "kvray-auth", "key": "auth_token"}
    has_secret = any(one["kind"] == "Secret" for one in manifests(name))
    assert has_secret == ("auth" not in CHART[name])


def plain(text: str) -> list[dict[str, Any]]:
    """Return the objects of a file, with kvray.yaml as data."""
    objects = [one for one in yaml.safe_load_all(text) if one is not None]
    for one in objects:
        one["metadata"].pop("labels", None)  # the chart has Helm's own there
        if one["kind"] == "ConfigMap":
            one["data"] = {name: yaml.safe_load(file) for name, file in one["data"].items()}
    return sorted(objects, key=lambda one: str(one["kind"]))


@pytest.mark.parametrize("path", [*EXAMPLE.glob("*.yaml")], ids=lambda path: path.name)
def test_the_chart_gives_the_manifests_of_kuberay(path):
    assert plain(text(path.name)) == plain(path.read_text())


def ray_pods(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the specs of the pods of the Ray cluster: the head's, and a worker's."""
    cluster = yaml.safe_load(helm.render(values)["raycluster.yaml"])["spec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def memory(pod: dict[str, Any]) -> int:
    return size(pod["containers"][0]["resources"]["limits"]["memory"])


@pytest.mark.parametrize(
    ("arena", "flush_s", "grace"),
    [
        ({"capacity": "1GiB"}, 0, 60),
        ({"capacity": "100GiB", "slot_min": "4KiB"}, 90.5, 151),
        ({"capacity": "68719476736"}, "90s", 150),
        ({"capacity": "1.5TiB", "slot_min": "1MiB"}, "5m", 360),
    ],
    ids=str,
)
def test_volume_and_memory_follow_from_any_arena_and_the_end_from_the_flush(
    arena, flush_s, grace, tmp_path
):
    _, pod = ray_pods({"kvray": {"arena": arena, "nvme": {"flush_s": flush_s}}})
    needed = arena_bytes(loaded(json.dumps({"arena": arena}), tmp_path))
    assert needed <= memory_volume(pod) <= 1.05 * needed + 2**31
    assert needed + 4 * 2**30 <= 0.95 * memory(pod) <= 1.05 * needed + 6 * 2**30
    assert pod["terminationGracePeriodSeconds"] == grace


KEPT = ", but KubeRay keeps it between nodes.minReplicas and nodes.maxReplicas; change those, too."


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"arena": {"place": "disk"}}, "at '/arena/place': value must be one of 'pod', 'host'"),
        ({"nodes": {"replicas": 0}}, f"nodes.replicas is 0{KEPT}"),
        ({"nodes": {"replicas": 100}}, f"nodes.replicas is 100{KEPT}"),
        ({"networkPolicy": None}, "at '': missing property 'networkPolicy'"),
        ({"nodes": {"affinity": None}}, "at '/nodes': missing property 'affinity'"),
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
def test_a_wrong_value_is_refused_in_one_sentence(values, sentence):
    with pytest.raises(helm.Refused) as refused:
        helm.render(values)
    *_, said = str(refused.value).splitlines()
    assert said.endswith(sentence)


def test_the_chart_has_the_settings_the_alerts_and_the_version_of_the_package():
    command = "run `python -m tests.unit.config.settings_table`"
    schema = json.loads(helm.SCHEMA.read_text())["$defs"]["config"]
    assert schema == helm.config_schema(), command
    assert helm.ALERTS_COPY.read_text() == package_file(ALERTS).read_text(), command
    assert yaml.safe_load((helm.CHART / "Chart.yaml").read_text())["appVersion"] == __version__


VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"}
VOLUMES |= {"projected", "secret"}


@pytest.mark.parametrize("name", PODS)
def test_pods_without_host_paths_pass_the_standard_restricted(name):
    """As https://kubernetes.io/docs/concepts/security/pod-security-standards/ has it."""
    for template in templates(name).values():
        pod = template["spec"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert all(one.keys() & VOLUMES for one in pod["volumes"])
        own = pod["securityContext"]
        assert own["runAsNonRoot"]
        assert own["runAsUser"] > 0
        assert own["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"] + pod.get("initContainers", []):
            rights = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
            assert container["securityContext"] == rights
            assert all("hostPort" not in port for port in container.get("ports", []))


def objects(values: dict[str, Any], file: str = "cluster.yaml") -> dict[tuple[str, str], Any]:
    """Return what a template gives, by kind and name; Kubernetes' own schemas take it."""
    made = [one for one in yaml.safe_load_all(helm.render(values)[file]) if one]
    for one in made:
        if not one["apiVersion"].startswith("monitoring.coreos.com/"):
            kubernetes_validate.validate(one, KUBERNETES, strict=True)
    return {(one["kind"], one["metadata"]["name"]): one for one in made}


def test_what_watches_and_guards_is_there_when_it_is_asked_for():
    assert objects({}) == {}
    labels = {"release": "prometheus"}
    monitoring = {"podMonitor": True, "prometheusRule": True, "labels": labels}
    made = objects({"monitoring": monitoring, "networkPolicy": {"enabled": True}})
    ray = {"matchLabels": {"ray.io/cluster": "kvray"}}
    monitor, rule = made["PodMonitor", "kvray"], made["PrometheusRule", "kvray"]
    for one in (monitor, rule):
        assert labels.items() <= one["metadata"]["labels"].items()
    assert monitor["spec"]["selector"] == ray
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    head = containers("default")["ray-head"]
    assert endpoint["port"] in [port["name"] for port in head["ports"]]
    assert rule["spec"] == yaml.safe_load(package_file(ALERTS).read_text())
    policy, engine = made["NetworkPolicy", "kvray"]["spec"], made["NetworkPolicy", "kvray-engine"]
    assert policy["podSelector"] == ray
    assert policy["ingress"][0] == {"from": [{"podSelector": ray}]}, "any port, of each other"
    assert engine["spec"]["ingress"] == [
        {"from": [{"podSelector": {}}], "ports": [{"port": "http"}]}
    ]


def test_pods_have_the_account_variables_affinity_files_images_and_user_that_are_given():
    mine = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    env = [{"name": "NCCL_DEBUG", "value": "INFO"}]
    secret = {"name": "tenants", "secret": {"secretName": "tenants", "defaultMode": 0o440}}
    mount = {"name": "tenants", "mountPath": "/tenants", "readOnly": True}
    place = {"nodeSelector": {"pool": "ray"}, "tolerations": [{"key": "pool", "value": "ray"}]}
    user = {"runAsUser": 1000650000, "runAsGroup": 2000, "fsGroup": 3000}
    values = {
        "arena": {"place": "host"},
        "kvray": {"security": {"tenant_secret_file": "/tenants/secret"}},
        "extraVolumes": [secret],
        "extraVolumeMounts": [mount],
        "serviceAccount": {"create": True, "annotations": {"a": "b"}},
        "head": {"extraEnv": env, "affinity": mine, **place},
        "worker": {"extraEnv": env},
        "nodes": {"affinity": mine},
        "engine": {"extraEnv": env, "affinity": mine},
        "images": {"pullPolicy": "Never"},
        "podSecurityContext": user,
    }
    assert ("ServiceAccount", "kvray") in objects(values)
    engine = objects(values, "engine.yaml")["Deployment", "kvray-engine"]["spec"]["template"]
    pods = [*ray_pods(values), engine["spec"]]
    for pod, own in zip(pods, (None, "podAntiAffinity", "podAffinity"), strict=True):
        assert pod["serviceAccountName"] == "kvray"
        assert pod["containers"][0]["env"][-1:] == env
        assert pod["affinity"].keys() == {"nodeAffinity", own} - {None}
        assert secret in pod["volumes"]
        assert mount in pod["containers"][0]["volumeMounts"]
        assert user.items() <= pod["securityContext"].items()
        for one in (*pod.get("initContainers", ()), *pod["containers"]):
            assert one["imagePullPolicy"] == "Never"
    head, worker, _ = pods
    assert place.items() <= head.items()
    assert "pool" not in worker["nodeSelector"]
    (init,) = worker["initContainers"]
    assert init["command"][2].startswith("chown 1000650000:2000 /kvray "), "directories of the node"


@pytest.mark.parametrize(("cpu", "written"), [(8, "8"), (0.5, "0.5"), ("1500m", "1500m")])
def test_cpus_may_be_a_number_as_set_writes_them_and_memory_that_is_enough_stays(cpu, written):
    _, worker = ray_pods({"worker": {"cpu": cpu, "memory": "96Gi"}, "engine": {"cpu": cpu}})
    assert memory(worker) == 96 * 2**30
    for container in worker["containers"]:
        assert container["resources"]["requests"]["cpu"] == written


def test_a_token_is_made_unless_a_secret_is_named():
    def tokens(values: dict[str, Any]) -> list[str]:
        objects = yaml.safe_load_all(helm.render(values)["config.yaml"])
        return [one["data"]["auth_token"] for one in objects if one["kind"] == "Secret"]

    (one,), (other,) = tokens({}), tokens({})
    assert one != other
    assert tokens({"auth": {"secret": "ours"}}) == []


def test_helm_finds_no_fault_in_the_chart_and_its_notes_name_figures_and_commands():
    assert helm.lint() == []
    notes = helm.render({})["NOTES.txt"]
    assert "72Gi of memory" in notes
    assert "kvray status" in notes
    assert notes.count("kubectl -n default ") == notes.count("kubectl")
