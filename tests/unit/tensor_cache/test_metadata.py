import pickle
from typing import Any

import pytest
import torch

from kvray.errors import ConfigError
from tests.unit.tensor_cache.conftest import METADATA, changed

CHANGES: list[dict[str, Any]] = [
    {"model": "other"},
    {"revision": "main"},
    {"variant": "lora-7"},
    {"dtype": torch.float16},
    {"dtype": torch.int32},
    {"num_layers": 4},
    {"num_kv_heads": 4, "head_size": 4},
    {"num_kv_heads": 4, "tokens_per_block": 2},
    {"tokens_per_block": 8},
    {"world_size": 2},
    {"world_size": 2, "rank": 1},
]


@pytest.mark.parametrize("changes", CHANGES)
def test_what_changes_the_bytes_changes_the_namespace(changes: dict[str, Any]) -> None:
    other = changed(METADATA, **changes)
    assert other.namespace().digest() != METADATA.namespace().digest()


def test_ranks_have_namespaces_of_their_own() -> None:
    first, second = (changed(METADATA, world_size=2, rank=rank) for rank in (0, 1))
    assert first.namespace() != second.namespace()


def test_the_layout_of_the_tensors_is_no_part_of_the_namespace() -> None:
    assert changed(METADATA, layout="vllm").namespace() == METADATA.namespace()


def test_name_and_revision_do_not_run_into_each_other() -> None:
    first = changed(METADATA, model="a@b", revision="c")
    second = changed(METADATA, model="a", revision="b@c")
    assert first.namespace() != second.namespace()


def test_a_name_is_never_taken_for_a_fingerprint() -> None:
    named = changed(METADATA, model="f00d")
    assert named.namespace() != named.namespace(fingerprint="f00d")


def test_a_revision_counts_for_a_checkpoint_too() -> None:
    one, other = (changed(METADATA, revision=r).namespace(fingerprint="f00d") for r in ("1", "2"))
    assert one != other


def test_a_block_has_the_bytes_of_its_tensors() -> None:
    assert METADATA.block_bytes == 3 * 2 * 2 * 4 * 8 * 4


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_layers": 0}, "num_layers must be a whole number of at least 1, not 0"),
        ({"head_size": 8.0}, "head_size must be a whole number"),
        ({"num_kv_heads": True}, "num_kv_heads must be a whole number"),
        ({"tokens_per_block": -1}, "tokens_per_block must be a whole number"),
        ({"rank": -1}, "rank must be a whole number of at least 0"),
        ({"rank": 1}, "rank 1 is not below world_size 1"),
        ({"layout": "hf"}, "layout must be 'huggingface' or 'vllm', not 'hf'"),
        ({"dtype": "float32"}, "dtype must be a torch.dtype"),
        ({"dtype": torch.complex128}, "dtype must be a torch.dtype of at most 8 bytes"),
        ({"model": ""}, "model must be a name or the path"),
    ],
)
def test_values_that_no_model_has_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        changed(METADATA, **changes)


def test_metadata_survives_pickling() -> None:
    assert pickle.loads(pickle.dumps(METADATA)) == METADATA  # noqa: S301 - our own bytes
