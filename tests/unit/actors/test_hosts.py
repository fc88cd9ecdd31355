"""What nodes are called, who is meant by a name, and that Ray's errors there end nothing."""

from types import SimpleNamespace

import pytest

from kvray.actors.hosts import labels, named, node_meant
from kvray.actors.ray_glue import calls
from kvray.errors import ConfigError

A, B, C = "0a1b2c3d4e5f", "0a99999999ff", "ffffffffffff"
HOSTS = {
    A: {"name": "gpu-1.rack", "ip": "10.0.0.1"},
    B: {"name": "gpu-2", "ip": "10.0.0.2"},
    C: {"name": "gpu-2", "ip": "10.0.0.3"},
}


def test_a_node_is_called_by_its_host_and_two_on_one_host_by_their_ids_too():
    assert labels(HOSTS) == {
        A: "gpu-1.rack (10.0.0.1)",
        B: f"gpu-2 (10.0.0.2, {B})",
        C: f"gpu-2 (10.0.0.3, {C})",
    }
    assert labels(HOSTS, with_ids=True)[A] == f"gpu-1.rack (10.0.0.1, {A})"


MEANT = {"gpu-1.rack": A, "gpu-1": A, "10.0.0.3": C, "0a1": A, f"kvray-shard-{B}": B, f"{A}00": A}
NOT_MEANT = {"gpu-2": "several nodes are", "0a": "several nodes are", "": "no node", "x": "no node"}


@pytest.mark.parametrize("text", MEANT)
def test_a_host_name_an_ip_or_an_id_means_a_node(text):
    assert node_meant(text, HOSTS) == MEANT[text]


@pytest.mark.parametrize("text", NOT_MEANT)
def test_who_means_no_node_or_several_is_told_which_there_are(text):
    with pytest.raises(ConfigError, match=NOT_MEANT[text]) as raised:
        node_meant(text, HOSTS)
    assert f"10.0.0.2, {B}" in str(raised.value)


def test_an_answer_for_people_has_hosts_wherever_it_had_ids():
    found = {
        "shards": [{"shard": f"kvray-shard-{A}", "leased": 3}],
        "says": f"No answer from kvray-mover-{A} and {C}, nor from {C}00.",
        f"kvray-shard-{A}": None,
        "hosts": HOSTS,
    }
    one, other = "gpu-1.rack (10.0.0.1)", f"gpu-2 (10.0.0.3, {C})"
    assert named(found, HOSTS) == {
        "shards": [{"shard": one, "leased": 3}],
        "says": f"No answer from {one} and {other}, nor from {C}00.",
        one: None,
        "hosts": HOSTS,
    }
    assert named(found, {}) == found


def test_hosts_are_those_of_ray_and_an_error_of_ray_leaves_the_ids(monkeypatch):
    node = {"NodeID": f"{A}77", "NodeManagerHostname": "gpu-1", "NodeManagerAddress": "10.0.0.1"}
    monkeypatch.setattr(calls, "ray", SimpleNamespace(nodes=lambda: [node]))
    assert calls.hosts_of([f"{A}77", f"{B}88"]) == {A: {"name": "gpu-1", "ip": "10.0.0.1"}}

    def fail() -> None:
        raise RuntimeError("GCS is away")

    monkeypatch.setattr(calls, "ray", SimpleNamespace(nodes=fail))
    assert calls.hosts_of([f"{A}77"]) == {}
