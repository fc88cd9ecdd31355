"""Whose connection to Ray a client uses, in one thread or several, and what it does without."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray

from kvray import client as client_module
from kvray.client import Client
from kvray.config import KVRayConfig
from kvray.errors import ShardUnavailable


class Connection:
    """A connection to Ray that takes a moment, and breaks if it is made twice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_up = False
        self.made = self.ended = 0
        monkeypatch.setattr(ray, "is_initialized", lambda: self.is_up)
        monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray has started a cluster"))
        monkeypatch.setattr(client_module, "connection", self)

    def connect_configured(self, config: KVRayConfig) -> None:
        self.made += 1
        time.sleep(0.1)
        self.is_up = True

    def disconnect(self) -> None:
        self.ended += 1
        self.is_up = False


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> Connection:
    return Connection(monkeypatch)


def test_clients_of_several_threads_make_one_connection(connection):
    with ThreadPoolExecutor(4) as threads:
        clients = list(threads.map(lambda _: Client(KVRayConfig()), range(4)))
    assert connection.made == 1
    for one in (*clients, *clients):
        one.close()
    assert connection.ended == 1


def test_a_client_without_a_connection_says_so_and_starts_no_ray(connection):
    client = Client(KVRayConfig())
    client.close()
    for ask in (client.status, client.clear, client.contents, lambda: client.drain("a")):
        with pytest.raises(ShardUnavailable, match="no connection to Ray"):
            ask()


def test_the_client_of_a_parent_is_of_no_use_in_a_fork_and_leaves_the_parent_its_own(
    connection, monkeypatch
):
    client = Client(KVRayConfig())
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    with pytest.raises(ShardUnavailable, match="fork"):
        client.status()
    client.close()
    assert connection.ended == 0
