"""How an engine's two halves start and find each other, and notice that weights are replaced."""

import gc
import subprocess
import sys
import weakref
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import kvray.connector
from kvray.connector import KvRayWorker
from kvray.connector.start import REPLACING, config_path_of, watch_weights
from kvray.errors import ConfigError, LayoutMismatch
from tests.kit.connector import BLOCK, HIT, PROMPT, Pair, Request, args_for, stand_in


def test_a_name_may_carry_its_configuration_file(environment, tmp_path, monkeypatch):
    path = tmp_path / "replica.yaml"
    path.write_text("connector: {replica: blue}\n")
    worker_class = getattr(kvray.connector, f"KvRayWorker@{path}")
    assert issubclass(worker_class, KvRayWorker)
    assert worker_class.__name__ == "KvRayWorker"
    worker = worker_class(args_for())
    assert worker._rank.shared.replica == "blue"
    worker.shutdown()
    for name in ("KvRayEngine@/x.yaml", "KvRayEngine"):
        with pytest.raises(AttributeError, match=name):
            getattr(kvray.connector, name)


URLS = {
    "kvray:///etc/kvray/my%20kvray.yaml": "/etc/kvray/my kvray.yaml",
    "/etc/kvray/kvray.yaml": "/etc/kvray/kvray.yaml",
    "kvray.yaml": "kvray.yaml",
    "": "/behind/the/name",
    None: "/behind/the/name",
}


@pytest.mark.parametrize(("url", "path"), URLS.items())
def test_server_url_goes_before_the_path_behind_the_name(caplog, url, path):
    caplog.set_level("INFO", "kvray.connector")
    assert config_path_of(args_for(), None) is None
    assert caplog.messages == []
    args = args_for(kv_connector_config=SimpleNamespace(server_url=url))
    assert config_path_of(args, "/behind/the/name") == path
    *warned, said = caplog.messages
    assert path in said
    assert ("server_url" in said) == bool(url)
    assert ["/behind/the/name" in one for one in warned] == [True] * bool(url)
    assert config_path_of(args, path) == path
    assert len(caplog.messages) == 2 + bool(url), "equal ones are no reason for a warning"


@pytest.mark.parametrize("url", ["tcp://localhost:5555", "kvray://node/kvray.yaml", "kvray:x.yaml"])
def test_a_server_url_of_a_server_is_refused_with_a_sentence(url):
    args = args_for(kv_connector_config=SimpleNamespace(server_url=url))
    with pytest.raises(ConfigError, match=rf"{url}.*kvray:///path/to/kvray\.yaml"):
        KvRayWorker(args)


def test_a_model_that_cannot_be_fingerprinted_needs_a_model_key(shard, monkeypatch):
    monkeypatch.delenv("KVRAY_CONNECTOR__MODEL_KEY")
    worker = KvRayWorker(args_for())
    with pytest.raises(ConfigError, match=r"'nowhere'.*connector\.model_key"):
        worker.register_kv_caches(torch.zeros(4, 2, 2, 8))
    worker.shutdown()


def test_another_layout_under_one_model_key_is_refused_at_the_start(make_pair):
    make_pair()
    other = KvRayWorker(args_for(cache={"tokens_per_block": 2 * BLOCK}))
    other._rank.shared._replica = "other"
    with pytest.raises(LayoutMismatch, match=r"model_key 'tiny'.*tokens_per_block 8 here, 4"):
        other.register_kv_caches(torch.zeros(4, 2, 2, 8))
    other.shutdown()


def test_an_engine_that_is_dropped_without_a_word_does_not_keep_its_pool(shard):
    pair = Pair()
    saver, engine = pair.worker._rank.saver, pair.engine
    assert saver is not None
    pool = weakref.ref(pair.pool.untyped_storage())
    worker, scheduler = weakref.ref(pair.worker), weakref.ref(pair.scheduler)
    del pair
    gc.collect()
    assert worker() is scheduler() is pool() is None
    saver.close(10)
    engine.unregister()
    for _ in ("worker", "scheduler"):
        engine.close()


_FULL_REQUEST = """
import sys
from tests.kit.connector import PROMPT, Pair, Request
pair = Pair()
print(pair.serve(Request(1, PROMPT)), "ray" in sys.modules)
"""


@pytest.mark.parametrize("make_pair", ["host"], indirect=True)
def test_an_engine_process_flushes_at_its_end_and_never_imports_ray(make_pair):
    command = [sys.executable, "-c", _FULL_REQUEST]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (["0", "False"], "")
    assert make_pair().serve(Request(2, PROMPT)) == HIT


@pytest.mark.parametrize(("module", "owner", "method"), REPLACING, ids=lambda one: one)
def test_every_engine_of_the_process_leaves_the_tier(monkeypatch, module, owner, method):
    def called(self: object, *args: object, **options: object) -> tuple[object, ...]:
        return (*args, *options.values())

    stand_in(monkeypatch, module, **{owner: type(owner, (), {})})
    watch_weights(Mock())  # without the method there is nothing to watch
    found = type(owner, (), {method: called})
    stand_in(monkeypatch, module, **{owner: found})
    versions: list[list[str | None]] = [[], []]
    engines = [Mock(name_weights=told.append) for told in versions]
    for engine in (*engines, engines[0]):
        watch_weights(engine)
    assert getattr(found(), method)(1, two=2) == (1, 2)
    assert versions == [[None], [None]]
    gone = weakref.ref(engines.pop())
    gc.collect()
    assert gone() is None
    getattr(found(), method)()
    assert versions == [[None, None], [None]]
