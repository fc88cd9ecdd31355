"""Two requests share a block's key exactly if the block's keys and values are equal.

Run as a script, it prints the keys of `EXAMPLES`.
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvray.config import load_config
from kvray.connector import base
from kvray.connector.read_layout import layout_of_tensor, read_layout
from kvray.connector.request import identify
from kvray.engine import model_name
from kvray.engine.cache_layout import CacheLayout
from kvray.engine.model_name import Adapters, fingerprints_dir
from kvray.engine.shared_state import SharedState
from kvray.identity.keys import chain_keys, request_seed
from tests.examples import examples
from tests.kit.connector import LLAMA, group_of, layout_of, read_args, region_of, stand_in

READ_S = 30.0
"""How long a request waits here for its adapter to be read; an engine's does not wait for it."""
NUM_LAYERS, NUM_PAGES = 4, 2
TOKEN_ELEMS = 32
"""Of one layer's keys or values, over all ranks."""


CHOICES: dict[str, list[Any]] = {
    "salt": [None, "a", "b", "", "1", 0, 1],
    "adapter": [None, 0, 1],  # which bytes lie at the path of the request's adapter
    "model": [0, 1],  # likewise
    "revision": [None, "main", "v2"],
    "quantization": [None, "FP8", "NVFP4"],
    "kv_dtype": ["float16", "bfloat16", "float8_e4m3fn"],
    "rope_theta": [None, 1e4, 1e6],
    "tokens_per_block": [4, 8],
    "num_ranks": [2, 1],
    "attention_dp": [False, True],
    "layout": ["flat", "one", "two", "window", "wider"],
    "engine": [None, "1.2.0", "1.3.0"],
    "attention_backend": ["TRTLLM", "FLASHINFER"],
}
"""All that names a prompt's blocks beside tokens and media, each with its default first."""
PLAIN = {"tokens": tuple(range(40)), "media": (), "rank": 0} | {
    name: values[0] for name, values in CHOICES.items()
}
"""The media are (position, content, length) of each item."""
Named = dict[str, Any]
"""What of these is otherwise."""


def keys(given: Named, root: Path) -> list[bytes]:
    """Return the keys of all full blocks, made by a new engine."""
    named = SimpleNamespace(**PLAIN | given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_name, "_WAIT_S", READ_S)
        if named.engine is not None:
            stand_in(patch, "tensorrt_llm", __version__=named.engine)
        engine = make_engine(named, root)
        engine.register(make_layout(named))
        known = Adapters(settings=engine.args.adapters, cache_dir=fingerprints_dir())
        identity = identify(make_request(named, root), known.fingerprint)
    assert identity is not None
    found: list[bytes] = chain_keys(
        list(named.tokens),
        tokens_per_block=engine.args.tokens_per_block,
        seed=request_seed(engine.identity.digest, salt=identity.salt, lora=identity.lora),
        media=identity.media,
    )
    assert len(found) == len(named.tokens) // named.tokens_per_block
    return found


def make_engine(named: Any, root: Path) -> SharedState:
    kwargs = {} if named.rope_theta is None else {"rope_theta": named.rope_theta}
    llm_args = SimpleNamespace(
        model=str(mount(root, "model", named.model)),
        revision=named.revision,
        model_kwargs=kwargs,
        quant_config=SimpleNamespace(quant_algo=named.quantization),
        attn_backend=named.attention_backend,
        tensor_parallel_size=named.num_ranks,
        rank=named.rank,
        enable_attention_dp=named.attention_dp,
        kv_cache_config=SimpleNamespace(
            tokens_per_block=named.tokens_per_block,
            use_kv_cache_manager_v2=named.layout != "flat",
        ),
    )
    return SharedState(read_args(llm_args), load_config(environ={}), Mock(process_name="engine"))


def make_request(named: Any, root: Path) -> Any:
    """Return what an engine shows of the request: a plain one lacks all but its tokens."""
    request = SimpleNamespace(request_id=1, prompt_len=len(named.tokens), lora_task_id=None)
    if named.salt is not None:
        name = "cache_salt" if isinstance(named.salt, str) else "cache_salt_id"
        setattr(request, name, named.salt)
    if named.adapter is not None:
        request.lora_task_id = 1
        request.py_lora_path = str(mount(root, "adapter", named.adapter))
    if named.media:
        positions, contents, lengths = zip(*named.media, strict=True)
        request.multimodal_hashes = [[content] * 8 for content in contents]
        request.multimodal_positions = list(positions)
        request.multimodal_lengths = list(lengths)
    return request


def make_layout(named: Any) -> CacheLayout:
    """Return the layout of one rank's pool: one tensor, or groups of layers as V2 reports them."""
    dtype = getattr(torch, named.kv_dtype)
    shards = 1 if named.attention_dp else named.num_ranks
    elems = TOKEN_ELEMS // shards * named.tokens_per_block
    if named.layout == "flat":
        return layout_of_tensor(torch.zeros((NUM_PAGES, NUM_LAYERS, 2, elems), dtype=dtype))
    windows = {"one": [None], "two": [None, None], "window": [None, 8], "wider": [None, 16]}
    groups = windows[named.layout]
    share = NUM_LAYERS // len(groups)
    pages = torch.zeros((NUM_PAGES, share * 2 * elems * dtype.itemsize), dtype=torch.uint8)
    region = region_of(pages, range(share))
    made = [
        group_of(group, range(group * share, (group + 1) * share), region, window_size=window)
        for group, window in enumerate(groups)
    ]
    return read_layout(layout_of(*made, tokens_per_block=named.tokens_per_block, dtype=dtype))


def mount(root: Path, kind: str, number: int) -> Path:
    """Have the one path of this process for a `kind` lead to other bytes; return it."""
    path = root / f"{kind}-{os.getpid()}"
    beside = path.with_suffix(".new")
    beside.symlink_to(root / kind / str(number))
    beside.replace(path)
    return path


TOKENS = st.integers(0, 3)  # few, so that chance would find what is keyed too little
ITEMS = st.tuples(st.integers(0, 30), st.integers(1, 3), st.integers(1, 3))
MEDIA = st.lists(ITEMS, max_size=3, unique_by=lambda item: item[0]).map(
    lambda items: tuple(sorted(items))
)
CASES = st.fixed_dictionaries(
    {
        "tokens": st.lists(TOKENS, min_size=32, max_size=40).map(tuple),
        "media": MEDIA,
        **{name: st.sampled_from(values) for name, values in CHOICES.items()},
    }
)
EXAMPLES: list[Named] = [
    *({name: value} for name, values in CHOICES.items() for value in values),
    {"media": ((3, 1, 2), (9, 2, 5))},
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two models and adapters, alike but for a byte, in a process that knows attention DP."""
    root = tmp_path_factory.mktemp("files")
    for kind, name in itertools.product(("model", "adapter"), "01"):
        directory = root / kind / name
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(LLAMA))
        (directory / "adapter_config.json").write_text("{}")
        (directory / f"{kind}.bin").write_bytes(b"weights" + name.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        for half in (base.KvCacheConnectorScheduler, base.KvCacheConnectorWorker):
            patch.setattr(half, "supports_attention_dp", True, raising=False)
        yield root


@settings(max_examples=examples(12))
@given(data=st.data())
@pytest.mark.parametrize("cause", CHOICES)
def test_blocks_of_another_cause_share_no_key(root, cause, data):
    one = data.draw(CASES)
    same = repr(one[cause])  # in which 1 and "1" differ
    others = [value for value in CHOICES[cause] if repr(value) != same]
    other = one | {cause: data.draw(st.sampled_from(others))}
    if cause == "attention_dp":  # which says nothing of one rank
        one, other = one | {"num_ranks": 2}, other | {"num_ranks": 2}
    assert not set(keys(one, root)) & set(keys(other, root))


@settings(max_examples=examples(60))
@given(one=CASES, media=MEDIA)
def test_prompts_share_keys_up_to_the_first_item_that_differs(root, one, media):
    differing = set(one["media"]) ^ set(media)
    first = min((position for position, _, _ in differing), default=len(one["tokens"]))
    assert_shared_until(first, one, one | {"media": media}, root)


@settings(max_examples=examples(60))
@given(one=CASES, item=ITEMS, field=st.sampled_from([0, 1, 2]))
def test_one_figure_of_one_item_is_enough_to_part_prompts(root, one, item, field):
    changed = tuple(value + (at == field) for at, value in enumerate(item))
    assert_shared_until(item[0], one | {"media": (item,)}, one | {"media": (changed,)}, root)


@settings(max_examples=examples(30))
@given(one=CASES)
def test_all_ranks_of_an_engine_name_blocks_alike(root, one):
    names = [keys(one | {"rank": rank}, root) for rank in range(one["num_ranks"])]
    assert all(other == names[0] for other in names)


@settings(max_examples=examples(12))
@given(one=CASES)
def test_releases_of_one_version_share_keys(root, one):
    assert keys(one | {"engine": "1.2.0"}, root) == keys(one | {"engine": "1.2.1"}, root)


def test_equal_requests_of_two_processes_share_all_keys(root):
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.connector.test_key_hygiene", str(root)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "1"},  # this process has another
    )
    assert done.stdout.split() == [b"".join(keys(one, root)).hex() for one in EXAMPLES]


def assert_shared_until(first: int, one: Named, other: Named, root: Path) -> None:
    """Check that keys are equal before the block with token `first`, and none are after."""
    left, right = keys(one, root), keys(other, root)
    shared = first // one["tokens_per_block"]
    assert left[:shared] == right[:shared]
    assert not set(left[shared:]) & set(right[shared:])


if __name__ == "__main__":
    for one in EXAMPLES:
        print(b"".join(keys(one, Path(sys.argv[1]))).hex())
