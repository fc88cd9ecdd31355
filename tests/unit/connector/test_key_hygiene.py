"""Two requests share a block's key exactly if the block's keys and values are equal."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvray.connector import base
from tests.examples import examples
from tests.unit.connector.named import Named, keys_of, to_json, write_files

CHOICES: dict[str, list[Any]] = {
    "salt": [None, "a", "b", "", "1", 0, 1],
    "adapter": [None, 0, 1],
    "model": [0, 1],
    "revision": [None, "main", "v2"],
    "quantization": [None, "FP8", "NVFP4"],
    "kv_dtype": ["float16", "bfloat16", "float8_e4m3fn"],
    "rope_theta": [None, 1e4, 1e6],
    "tokens_per_block": [4, 8],
    "num_ranks": [1, 2],
    "attention_dp": [False, True],
    "layout": ["flat", "one", "two", "window", "wider"],
    "engine": [None, "1.2.0", "1.3.0"],
    "attention_backend": ["TRTLLM", "FLASHINFER"],
}
TOKENS = st.integers(0, 3)  # few, so that chance would find what is keyed too little
ITEMS = st.tuples(st.integers(0, 30), st.integers(1, 3), st.integers(1, 3))
MEDIA = st.lists(ITEMS, max_size=3, unique_by=lambda item: item[0]).map(
    lambda items: tuple(sorted(items))
)
CASES = st.builds(
    Named,
    tokens=st.lists(TOKENS, min_size=32, max_size=40).map(tuple),
    media=MEDIA,
    **{name: st.sampled_from(values) for name, values in CHOICES.items()},
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with models and adapters, in a process that knows attention DP."""
    root = tmp_path_factory.mktemp("files")
    write_files(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        for half in (base.KvCacheConnectorScheduler, base.KvCacheConnectorWorker):
            patch.setattr(half, "supports_attention_dp", True, raising=False)
        yield root


def keys(named: Named, root: Path) -> list[bytes]:
    found = keys_of(named, root)
    assert found is not None
    assert len(found) == len(named.tokens) // named.tokens_per_block
    return found


@settings(max_examples=examples(12))
@given(data=st.data())
@pytest.mark.parametrize("cause", CHOICES)
def test_blocks_of_another_cause_share_no_key(root: Path, cause: str, data: st.DataObject) -> None:
    one = data.draw(CASES)
    others = [value for value in CHOICES[cause] if not is_same(value, getattr(one, cause))]
    other = replace(one, **{cause: data.draw(st.sampled_from(others))})
    if one.num_ranks == other.num_ranks == 1 and cause == "attention_dp":
        one, other = replace(one, num_ranks=2), replace(other, num_ranks=2)
    assert not set(keys(one, root)) & set(keys(other, root))


@settings(max_examples=examples(60))
@given(one=CASES, place=st.integers(0, 30), token=TOKENS)
def test_prompts_share_keys_up_to_the_first_token_that_differs(
    root: Path, one: Named, place: int, token: int
) -> None:
    tokens = (*one.tokens[:place], token, *one.tokens[place + 1 :])
    first = place if tokens != one.tokens else len(tokens)
    assert_shared_until(first, one, replace(one, tokens=tokens), root)


@settings(max_examples=examples(60))
@given(one=CASES, media=MEDIA)
def test_prompts_share_keys_up_to_the_first_item_that_differs(
    root: Path, one: Named, media: tuple[tuple[int, int, int], ...]
) -> None:
    differing = set(one.media) ^ set(media)
    first = min((position for position, _, _ in differing), default=len(one.tokens))
    assert_shared_until(first, one, replace(one, media=media), root)


@settings(max_examples=examples(60))
@given(one=CASES, item=ITEMS, field=st.sampled_from([0, 1, 2]))
def test_one_figure_of_one_item_is_enough_to_part_prompts(
    root: Path, one: Named, item: tuple[int, int, int], field: int
) -> None:
    changed = tuple(value + (at == field) for at, value in enumerate(item))
    assert_shared_until(item[0], replace(one, media=(item,)), replace(one, media=(changed,)), root)


@settings(max_examples=examples(30))
@given(one=CASES)
def test_equal_requests_of_two_engines_share_all_keys(root: Path, one: Named) -> None:
    assert keys(one, root) == keys(replace(one), root)


@settings(max_examples=examples(30))
@given(one=CASES)
def test_all_ranks_of_an_engine_name_blocks_alike(root: Path, one: Named) -> None:
    names = [keys(replace(one, rank=rank), root) for rank in range(one.num_ranks)]
    assert all(other == names[0] for other in names)


@settings(max_examples=examples(12))
@given(one=CASES)
def test_releases_of_one_version_share_keys(root: Path, one: Named) -> None:
    assert keys(replace(one, engine="1.2.0"), root) == keys(replace(one, engine="1.2.1"), root)


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_equal_requests_of_two_processes_share_all_keys(root: Path, hash_seed: str) -> None:
    cases = [Named(**{name: value}) for name, values in CHOICES.items() for value in values]
    cases += [Named(media=((3, 1, 2), (9, 2, 5))), Named(num_ranks=2, attention_dp=True)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.connector.named", str(root)],
        input=to_json(cases),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )
    assert done.stdout.split() == [b"".join(keys(case, root)).hex() for case in cases]


def assert_shared_until(first: int, one: Named, other: Named, root: Path) -> None:
    """Check that keys are equal before the block with token `first`, and none are after."""
    left, right = keys(one, root), keys(other, root)
    shared = first // one.tokens_per_block
    assert left[:shared] == right[:shared]
    assert not set(left[shared:]) & set(right[shared:])


def is_same(left: object, right: object) -> bool:
    """Whether two causes are one; 1 and "1" are not, and neither are None and ""."""
    return type(left) is type(right) and left == right
