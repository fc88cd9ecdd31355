"""Requests of engines, from what an engine says of itself to the keys of a prompt's blocks.

Run as a script, it prints the keys of requests that it reads from standard input as JSON.
"""

import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch

from kvray.config import load_config
from kvray.connector.model.read_layout import layout_of_tensor, read_layout
from kvray.connector.request.identity import identify
from kvray.engine.model import adapters
from kvray.engine.model.adapters import Adapters, fingerprints_dir
from kvray.engine.model.cache_layout import CacheLayout
from kvray.engine.shared_state import SharedState
from kvray.identity.keys import chain_keys, request_seed
from kvray.node import NodeLink, Registration
from tests.unit.connector.llm_args import LLAMA, read_args

READ_S = 30.0
"""How long a request waits here for its adapter to be read; an engine's does not wait for it."""
NUM_LAYERS, NUM_PAGES = 4, 2
TOKEN_ELEMS = 32
"""Of one layer's keys or values, over all ranks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Named:
    """Everything that names the blocks of one prompt."""

    tokens: tuple[int, ...] = tuple(range(40))
    salt: str | int | None = None
    adapter: int | None = None
    """Which bytes lie at the path of the request's adapter; None: it has none."""
    media: tuple[tuple[int, int, int], ...] = ()
    """(position, content, length) of each item."""
    model: int = 0
    """Which bytes lie at the model's path."""
    revision: str | None = None
    quantization: str | None = None
    kv_dtype: str = "float16"
    rope_theta: float | None = None
    tokens_per_block: int = 4
    num_ranks: int = 2
    attention_dp: bool = False
    layout: str = "flat"
    engine: str | None = None
    attention_backend: str = "TRTLLM"
    rank: int = 0


class Link:
    """A link to a node whose shard takes every rank."""

    process_name = "engine"

    def register(self, registration: Registration) -> None:
        """Take it."""

    def unregister(self, registration: Registration) -> None:
        """Let it go."""


def write_files(root: Path) -> None:
    """Write two models and two adapters, alike but for a byte of their weights."""
    for kind, name in itertools.product(("model", "adapter"), "01"):
        directory = root / kind / name
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(LLAMA))
        (directory / "adapter_config.json").write_text("{}")
        (directory / f"{kind}.bin").write_bytes(b"weights" + name.encode())


def keys_of(named: Named, root: Path) -> list[bytes] | None:
    """Return the keys of all full blocks, made by a new engine; None if they have none."""
    with engine_version(named.engine):
        engine = make_engine(named, root)
        engine.pool.register(make_layout(named))
    with patch.object(adapters, "_WAIT_S", READ_S):
        known = Adapters(settings=engine.args.adapters, cache_dir=fingerprints_dir())
        identity = identify(make_request(named, root), known.fingerprint)
    if identity is None:
        return None
    return cast(
        list[bytes],
        chain_keys(
            list(named.tokens),
            tokens_per_block=engine.args.tokens_per_block,
            seed=request_seed(engine.pool.namespace_digest, salt=identity.salt, lora=identity.lora),
            media=identity.media,
        ),
    )


def make_engine(named: Named, root: Path) -> SharedState:
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
    link = cast(NodeLink, Link())
    return SharedState(read_args(llm_args), load_config(environ={}), link)


def make_request(named: Named, root: Path) -> Any:
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


def make_layout(named: Named) -> CacheLayout:
    """Return the layout of one rank's pool: one tensor, or groups of layers as V2 reports them."""
    dtype = getattr(torch, named.kv_dtype)
    shards = 1 if named.attention_dp else named.num_ranks
    elems = TOKEN_ELEMS // shards * named.tokens_per_block
    if named.layout == "flat":
        return layout_of_tensor(torch.zeros((NUM_PAGES, NUM_LAYERS, 2, elems), dtype=dtype))
    windows = {"one": [None], "two": [None, None], "window": [None, 8], "wider": [None, 16]}
    groups = windows[named.layout]
    share = NUM_LAYERS // len(groups)
    return read_layout(
        SimpleNamespace(
            tokens_per_block=named.tokens_per_block,
            dtype=dtype,
            groups=[
                SimpleNamespace(
                    layer_group_id=group,
                    layer_ids=list(range(group * share, (group + 1) * share)),
                    window_size=window,
                    regions=[_region(share, elems * dtype.itemsize)],
                )
                for group, window in enumerate(groups)
            ],
        )
    )


def _region(num_layers: int, buffer_bytes: int) -> SimpleNamespace:
    pages = torch.zeros((NUM_PAGES, num_layers * 2 * buffer_bytes), dtype=torch.uint8)
    return SimpleNamespace(
        base=pages.data_ptr(),
        size=pages.shape[1],
        stride=pages.shape[1],
        num_slots=NUM_PAGES,
        as_tensor=lambda _dtype: pages,
        buffers=[
            SimpleNamespace(layer_id=layer, role=role, expansion=1)
            for layer in range(num_layers)
            for role in ("key", "value")
        ],
    )


def mount(root: Path, kind: str, number: int) -> Path:
    """Have the one path of this process for a `kind` lead to other bytes; return it."""
    path = root / f"{kind}-{os.getpid()}"
    beside = path.with_suffix(".new")
    beside.symlink_to(root / kind / str(number))
    beside.replace(path)
    return path


@contextmanager
def engine_version(version: str | None) -> Iterator[None]:
    """Have TensorRT-LLM of a version be imported; None: none."""
    if version is None:
        yield
        return
    package = ModuleType("tensorrt_llm")
    vars(package)["__version__"] = version
    sys.modules["tensorrt_llm"] = package
    try:
        yield
    finally:
        del sys.modules["tensorrt_llm"]


def to_json(cases: list[Named]) -> str:
    return json.dumps([dataclasses.asdict(case) for case in cases])


def from_json(text: str) -> list[Named]:
    return [
        Named(
            **case
            | {
                "tokens": tuple(case["tokens"]),
                "media": tuple(tuple(item) for item in case["media"]),
            }
        )
        for case in json.loads(text)
    ]


if __name__ == "__main__":
    for one in from_json(sys.stdin.read()):
        keys = keys_of(one, Path(sys.argv[1]))
        print(None if keys is None else b"".join(keys).hex())
