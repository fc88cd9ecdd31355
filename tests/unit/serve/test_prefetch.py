"""Prefetching: for a moment, and what one request or node lacks costs the others nothing."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.serve")

import kvray.serve.prefetch
from kvray.client import Prefetched
from kvray.errors import ConfigError, ShardUnavailable
from kvray.serve.prefetch import Prefetcher
from kvray.serve.settings import Settings

BROUGHT = Prefetched(num_tokens=2, staged_tokens=2, reason="none")


class Client:
    """As `kvray.Client`: what it is asked, and what goes wrong, by replica."""

    def __init__(self, _: object) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self.failures: dict[str, Exception] = {}
        self.is_free = threading.Event()
        self.is_free.set()

    def prefetch(self, tokens: list[int], *, replica: str, salt: str | None) -> Prefetched:
        self.asked.append((replica, salt))
        self.is_free.wait(10)
        if replica in self.failures:
            raise self.failures[replica]
        return BROUGHT


@pytest.fixture
def prefetcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Prefetcher]:
    monkeypatch.setattr(kvray.serve.prefetch, "Client", Client)
    config = tmp_path / "kvray.yaml"
    config.write_text("cluster_name: test\n")
    made = Prefetcher(Settings(kvray_config=config, prefetch_timeout_s=0.1))
    yield made
    made._threads.shutdown()


def bring(prefetcher: Prefetcher, *replicas: str) -> list[Prefetched | None]:
    async def all_of() -> list[Prefetched | None]:
        return [await prefetcher.bring([1, 2], name, "acme/1") for name in replicas]

    return asyncio.run(all_of())


def test_it_asks_for_the_prompt_with_its_salt(prefetcher: Prefetcher) -> None:
    client: Any = prefetcher._client
    assert bring(prefetcher, "a") == [BROUGHT]
    assert client.asked == [("a", "acme/1")]


def test_a_node_that_fails_is_left_alone_and_the_others_are_not(prefetcher: Prefetcher) -> None:
    client: Any = prefetcher._client
    client.failures["a"] = ShardUnavailable("No answer.")
    assert bring(prefetcher, "a", "a", "b") == [None, None, BROUGHT]
    assert [name for name, _ in client.asked] == ["a", "b"]


def test_a_late_answer_is_not_waited_for_twice(prefetcher: Prefetcher) -> None:
    client: Any = prefetcher._client
    client.is_free.clear()
    try:
        assert bring(prefetcher, "a", "a") == [None, None]
    finally:
        client.is_free.set()
    assert [name for name, _ in client.asked] == ["a"]


def test_a_request_that_cannot_be_prefetched_costs_the_others_nothing(
    prefetcher: Prefetcher, caplog: pytest.LogCaptureFixture
) -> None:
    client: Any = prefetcher._client
    client.failures["a"] = ConfigError("The prompt names no tenant.")
    assert bring(prefetcher, "a", "a") == [None, None]
    client.failures.clear()
    assert bring(prefetcher, "a") == [BROUGHT]
    assert caplog.text.count("names no tenant") == 1, "once is enough"


def test_token_ids_that_are_none_are_asked_of_nobody(prefetcher: Prefetcher) -> None:
    client: Any = prefetcher._client
    assert asyncio.run(prefetcher.bring([2**40], "a", None)) is None
    assert client.asked == []


def test_without_time_nothing_is_asked() -> None:
    assert bring(Prefetcher(Settings(prefetch_timeout_s=0)), "a") == [None]
