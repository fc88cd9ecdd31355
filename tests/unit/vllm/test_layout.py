"""What vLLM registers: each layer's bytes of a block are found where its configuration says."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvray.errors import ConfigError
from kvray.vllm.layout import read_layout

BLOCKS, PAGE = 6, 32


def config(*, layers: int = 3, is_packed: bool = False, **spec: Any) -> SimpleNamespace:
    """Return a configuration whose blocks have their layers apart, or end to end."""
    names = [f"model.layers.{layer}.attn" for layer in range(layers)]
    fields = {"page_size_bytes": PAGE, "block_size": 4, "head_size_v": 8, "dtype": torch.float32}
    placed = SimpleNamespace(
        size=layers * BLOCKS * PAGE,
        layers=list(names),
        layer_stride=PAGE if is_packed else BLOCKS * PAGE,
        block_stride=layers * PAGE if is_packed else PAGE,
        offset=0,
        host_resident=False,
    )
    group = SimpleNamespace(layer_names=names, kv_cache_spec=SimpleNamespace(**{**fields, **spec}))
    return SimpleNamespace(num_blocks=BLOCKS, kv_cache_tensors=[placed], kv_cache_groups=[group])


def caches(of: SimpleNamespace) -> dict[str, torch.Tensor]:
    """Return the tensors of the layers, over bytes that are numbered."""
    (placed,) = of.kv_cache_tensors
    memory = (torch.arange(placed.size) % 251).to(torch.uint8)
    return {
        name: memory.as_strided(
            (of.num_blocks, PAGE), (placed.block_stride, 1), index * placed.layer_stride
        )
        for index, name in enumerate(placed.layers)
    }


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_page_has_each_layer_s_bytes_of_its_block(is_packed: bool) -> None:
    described = config(is_packed=is_packed)
    tensors = caches(described)
    (group,) = read_layout(tensors, described).groups
    page = torch.cat([region.pages[4] for region in group.own])
    assert torch.equal(page, torch.cat([tensor[4] for tensor in tensors.values()]))
    assert len(group.own) == (1 if is_packed else 3)
    assert [step.layers for region in group.own for step in region.steps] == [(0,), (1,), (2,)]


def test_pages_are_the_engine_s_own_memory() -> None:
    described = config()
    tensors = caches(described)
    (group,) = read_layout(tensors, described).groups
    group.own[1].pages[2] = 7
    assert (tensors["model.layers.1.attn"][2] == 7).all()


def test_a_latent_cache_is_the_same_on_all_ranks() -> None:
    described = config(head_size_v=0)
    layout = read_layout(caches(described), described)
    assert (layout.kv_factor, layout.num_parts(4)) == (1, 1)
    described = config()
    layout = read_layout(caches(described), described)
    assert (layout.kv_factor, layout.num_parts(4)) == (2, 4)


def test_several_groups_of_layers_are_refused() -> None:
    described = config()
    described.kv_cache_groups *= 2
    with pytest.raises(ConfigError, match="--disable-hybrid-kv-cache-manager"):
        read_layout(caches(config()), described)


def test_a_layer_without_a_cache_is_refused() -> None:
    described = config()
    tensors = caches(described)
    del tensors["model.layers.2.attn"]
    with pytest.raises(ConfigError, match=r"no KV cache for model\.layers\.2"):
        read_layout(tensors, described)
    described.kv_cache_tensors[0].layers.pop()
    with pytest.raises(ConfigError, match=r"no cache for 1 layers, model\.layers\.2"):
        read_layout(tensors, described)


def test_a_layer_that_lies_elsewhere_is_refused() -> None:
    described = config()
    tensors = caches(described)
    tensors["model.layers.1.attn"] = tensors["model.layers.1.attn"].clone()
    with pytest.raises(ConfigError, match="lies elsewhere"):
        read_layout(tensors, described)


def test_blocks_that_overlap_are_refused() -> None:
    described = config(page_size_bytes=2 * PAGE)
    with pytest.raises(ConfigError, match="do not overlap"):
        read_layout(caches(described), described)
