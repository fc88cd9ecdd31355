import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvray.config import KVRayConfig
from kvray.errors import ConfigError
from kvray.tensor_cache import TensorCache
from tests.unit.tensor_cache.conftest import METADATA, changed

pytestmark = pytest.mark.usefixtures("shard")


@pytest.fixture(autouse=True)
def _destroyed() -> Iterator[None]:
    yield
    TensorCache.destroy("one")
    TensorCache.destroy("two")


def test_an_id_names_one_cache(config: KVRayConfig) -> None:
    made = TensorCache.get_or_create("one", config, METADATA)
    assert TensorCache.get_or_create("one", config, replace(METADATA)) is made
    assert TensorCache.get("one") is made
    assert TensorCache.get_or_create("two", config, METADATA) is not made


def test_an_unknown_id_has_no_cache() -> None:
    assert TensorCache.get("one") is None
    TensorCache.destroy("one")


def test_a_destroyed_cache_is_closed_and_its_id_free(config: KVRayConfig) -> None:
    made = TensorCache.get_or_create("one", config, METADATA)
    TensorCache.destroy("one")
    assert made.closed
    assert TensorCache.get("one") is None
    again = TensorCache.get_or_create("one", config, changed(METADATA, revision="2"))
    assert again is not made


def test_a_cache_that_was_closed_is_recreated(config: KVRayConfig) -> None:
    with TensorCache.get_or_create("one", config, METADATA):
        pass
    assert TensorCache.get("one") is None
    assert not TensorCache.get_or_create("one", config, METADATA).closed


def test_other_metadata_under_a_known_id_is_refused(config: KVRayConfig) -> None:
    TensorCache.get_or_create("one", config, METADATA)
    with pytest.raises(ConfigError, match="'one' exists with other values of num_layers, layout"):
        TensorCache.get_or_create("one", config, changed(METADATA, num_layers=1, layout="vllm"))


def test_another_configuration_under_a_known_id_is_refused(config: KVRayConfig) -> None:
    TensorCache.get_or_create("one", config, METADATA)
    other = config.model_copy(update={"cluster_name": "other"})
    with pytest.raises(ConfigError, match="other values of the configuration; destroy it"):
        TensorCache.get_or_create("one", other, METADATA)


def test_threads_that_ask_at_once_get_one_cache(config: KVRayConfig) -> None:
    found: list[TensorCache] = []
    together = threading.Barrier(8)

    def ask() -> None:
        together.wait()
        found.append(TensorCache.get_or_create("one", config, METADATA))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


def test_caches_of_one_process_report_under_different_names(config: KVRayConfig) -> None:
    first = TensorCache.get_or_create("one", config, METADATA)
    second = TensorCache.get_or_create("two", config, METADATA)
    assert [first._place[2], second._place[2]] == ["test", "test.2"]
    TensorCache.destroy("one")
    assert TensorCache.get_or_create("one", config, METADATA)._place[2] == "test"
