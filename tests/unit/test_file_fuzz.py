"""Small files of any content are read, or refused or ignored in the way that the reader says."""

import contextlib
import json
import os
import struct
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvray.actors.owner.claim import owner_of
from kvray.actors.tier import local_ray
from kvray.actors.tier.ray_node import read_address
from kvray.cli.asking import read_tokens
from kvray.errors import ConfigError
from kvray.identity.fingerprint import fingerprint_model
from kvray.identity.tenant import read_secret
from kvray.lab.replay.reading import read_trace
from kvray.store.machine.side_file import OWNER_BYTE, SideFile
from tests.examples import examples
from tests.unit.mutations import ANY_JSON, changed_bytes, changed_json

fuzzed = settings(
    max_examples=examples(80), suppress_health_check=[HealthCheck.function_scoped_fixture]
)

TEXTS = (
    st.binary(max_size=200)
    | st.text(max_size=200).map(lambda one: one.encode("utf-8", "surrogatepass"))
    | ANY_JSON.map(lambda one: json.dumps(one).encode())
)
DEEP = b'{"a":' * 2_000
DEEP_LIST = b"[" * 5_000


def like(valid: Any) -> st.SearchStrategy[bytes]:
    """Return files that are `valid` but for something in the JSON, or in its bytes."""
    plain = json.dumps(valid).encode()
    return changed_json(valid).map(lambda one: json.dumps(one).encode()) | changed_bytes(plain)


HEADER = {
    "__metadata__": {"format": "pt"},
    "model.a": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]},
    "model.b": {"dtype": "BF16", "shape": [9], "data_offsets": [32, 50]},
}
LOCAL = {"address": "127.0.0.1:6379", "token": "t", "pid": os.getpid(), "started": 1.0}
LOCAL |= {"dashboard_url": None}
REQUEST = {"output_length": 5, "hash_ids": [1, 2, 3]}
REQUESTS = [REQUEST | {"timestamp": 1000 * n, "input_length": 1025 + n} for n in range(3)]


@fuzzed
@given(text=TEXTS | like([1, 15043, 29892]))
@example(DEEP)
@example(DEEP_LIST)
@example(b"9" * 10_000)
def test_a_file_of_tokens(tmp_path, text):
    (tmp_path / "tokens").write_bytes(text)
    with contextlib.suppress(ConfigError):
        assert all(type(token) is int for token in read_tokens(tmp_path / "tokens"))


@fuzzed
@given(head=TEXTS | like(HEADER), length=st.none() | st.integers(0, 2**64 - 1))
@example(DEEP, None)
@example(DEEP_LIST, None)
@example(b'{"a":{"data_offsets":[0,1e999]}}', None)
@example(b'{"a":{"data_offsets":[-5,99]}}', None)
def test_the_header_of_a_file_of_weights(tmp_path, head, length):
    length = len(head) if length is None else length
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", length) + head + bytes(50))
    with contextlib.suppress(ConfigError):
        assert len(fingerprint_model(tmp_path, cache_dir=None)) == 64


@fuzzed
@given(data=st.data())
def test_a_fingerprint_that_was_kept_and_is_changed_is_right_or_recreated(tmp_path, data):
    model, cache = tmp_path / "model", tmp_path / "cache"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    (model / "model.bin").write_bytes(b"weights")
    for old in cache.glob("*"):
        old.unlink()
    right = fingerprint_model(model, cache_dir=cache)
    (kept,) = cache.glob("*.json")
    kept.write_bytes(data.draw(TEXTS | st.just(DEEP) | like(json.loads(kept.read_text()))))
    assert fingerprint_model(model, cache_dir=cache) == right


@fuzzed
@given(lines=st.lists(TEXTS | st.sampled_from(REQUESTS).flatmap(like), max_size=4))
@example([b'"hash_ids"' + DEEP_LIST])
@example([b'{"hash_ids": [1], "timestamp": 1, "input_length": 1e999, "output_length": 1}'])
@example([b'"hash_ids"' + DEEP])
@example([b'{"hash_ids": [99999999999999999999999], "timestamp": 0, "input_length": 512}'])
def test_a_trace(tmp_path, lines):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, REQUESTS)))
    assert read_trace(path).num_refs == 9, "what is changed is a trace"
    path.write_bytes(b"\n".join(lines))
    with contextlib.suppress(ConfigError):
        assert read_trace(path).num_refs > 0


@fuzzed
@given(text=TEXTS | like({"shard": "kvray-shard-1", "pid": os.getpid(), "since": 1e9}))
@example(DEEP)
def test_the_note_on_an_owner_is_believed_only_if_it_can_be_read(tmp_path, text):
    file = SideFile.at(tmp_path / "owner")
    assert file.try_lock(OWNER_BYTE) or file.holder_of(OWNER_BYTE) == os.getpid()
    (tmp_path / "owner.json").write_bytes(text)
    owner = owner_of(tmp_path)
    assert owner is not None
    assert owner.pid == os.getpid()
    assert str(owner)


@fuzzed
@given(text=TEXTS | like(LOCAL))
@example(DEEP)
@example(b'{"address":1,"pid":"x","started":[],"token":{},"dashboard_url":0}')
@example(b"[]")
@example(b'{"pid": 1}')
@example(b'{"address":"","pid":-1,"started":1,"token":"","dashboard_url":null}')
def test_what_a_local_ray_has_written_down(tmp_path, monkeypatch, text):
    monkeypatch.setattr(local_ray, "local_dir", lambda name: tmp_path)
    (tmp_path / local_ray._STATE_FILE).write_bytes(text)
    assert local_ray.find("t") is None


@fuzzed
@given(text=TEXTS)
def test_the_address_that_a_head_has_written_down_and_a_secret(tmp_path, text):
    path = tmp_path / "ray_current_cluster"
    path.write_bytes(text)
    assert isinstance(read_address(tmp_path), str)
    path.chmod(0o600)
    with contextlib.suppress(ConfigError):
        assert read_secret(path, setting="x") == text.strip()
