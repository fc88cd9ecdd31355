"""What kvray reads of vLLM: requests, the caches that it registers, its configuration."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvray.engine.request import Identity, Prompt
from kvray.errors import ConfigError
from kvray.vllm.read import RequestReader, read_layout, refuse_unsupported

TOKENS = [1, 2, 3, 4, 5]


def request(**changes: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "request_id": "cmpl-1-0",
        "prompt_token_ids": TOKENS[:3],
        "all_token_ids": TOKENS,
        "prompt_embeds": None,
        "prompt_is_token_ids": None,
        "resumable": False,
        "pooling_params": None,
        "mm_features": [],
        "lora_request": None,
        "cache_salt": None,
        "skip_reading_prefix_cache": False,
    }
    return SimpleNamespace(**{**fields, **changes})


def feature(name: str | None, **place: Any) -> SimpleNamespace:
    found = SimpleNamespace(**{"offset": 1, "length": 2, "is_embed": None, **place})
    return SimpleNamespace(modality="image", identifier=name, mm_position=found)


@pytest.fixture
def reader() -> RequestReader:
    return RequestReader(SimpleNamespace(adapters=""))  # type: ignore[arg-type]


def read(reader: RequestReader, **changes: Any) -> Prompt:
    found = reader.read(request(**changes), 7, 0)
    assert isinstance(found, Prompt)
    return found


def test_a_text_is_its_tokens_with_what_it_has_generated(reader):
    found = read(reader)
    assert (found.request_id, found.name) == (7, "cmpl-1-0")
    assert (found.tokens, found.prompt_len) == (TOKENS, 5)
    assert (found.identity, found.is_unread) == (Identity(), False)
    assert read(reader, cache_salt="a").identity.salt == "a"
    assert read(reader, skip_reading_prefix_cache=True).is_unread


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": None, "prompt_embeds": object()},
        {"prompt_embeds": object()},
        {"prompt_is_token_ids": [True, False, True]},
        {"resumable": True},
        {"pooling_params": object()},
        {"mm_features": [feature(None)]},
        {"mm_features": [feature("")]},
    ],
)
def test_more_than_tokens_bypasses_the_cache(reader, changes):
    assert isinstance(reader.read(request(**changes), 7, 0), str)


def test_media_differ_by_name_place_length_and_mask(reader):
    kinds = [
        feature("a"),
        feature("b"),
        feature("a", offset=2),
        feature("a", length=3),
        feature("a", is_embed=torch.tensor([True, False])),
        feature("a", is_embed=torch.tensor([False, True])),
    ]
    found = {read(reader, mm_features=[one]).identity.media for one in kinds}
    assert len(found) == len(kinds)
    assert read(reader, mm_features=[feature("a")]).identity.media in found


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer than an engine does, so that a busy machine makes no miss."""
    monkeypatch.setattr("kvray.engine.model_name._WAIT_S", 10.0)


def write_adapter(directory: Path, content: int) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.bin").write_bytes(bytes([content]) * 100)
    return directory


def adapter_of(
    reader: RequestReader, number: int, name: str, path: object, *, is_in_place: bool = False
) -> bytes | None:
    """Return what identifies the adapter of a request; None if that bypasses the cache."""
    asked = SimpleNamespace(
        lora_int_id=number, lora_name=name, lora_path=str(path), load_inplace=is_in_place
    )
    found = reader.read(request(lora_request=asked), 7, 0)
    return None if isinstance(found, str) else found.identity.lora


def test_adapters_differ_by_their_bytes_and_ones_loaded_in_place_bypass(reader, tmp_path):
    paths = [write_adapter(tmp_path / name, content) for content, name in enumerate("ab")]
    loras = [adapter_of(reader, 1 + place, path.name, path) for place, path in enumerate(paths)]
    assert None not in loras
    assert loras[0] != loras[1]
    assert adapter_of(reader, 1, "a", paths[0], is_in_place=True) is None
    assert adapter_of(reader, 3, "c", "someone/adapter") is None
    with pytest.raises(ConfigError, match="nowhere"):
        adapter_of(reader, 4, "d", tmp_path / "nowhere")


def test_a_new_version_at_the_path_of_an_old_one_bypasses_as_vllm_keeps_the_old_blocks(
    reader, tmp_path
):
    path = write_adapter(tmp_path / "a", 1)
    before = adapter_of(reader, 1, "poet", path)
    assert adapter_of(reader, 2, "poet", path) == before is not None, "it is loaded again"
    write_adapter(path, 2)
    assert adapter_of(reader, 3, "poet", path) is None
    assert adapter_of(reader, 4, "other", path) not in (None, before)
    assert adapter_of(reader, 5, "poet", write_adapter(tmp_path / "b", 2)) is not None


def test_blocks_of_an_adapter_loaded_in_place_are_in_vllm_s_cache_as_well(reader, tmp_path):
    path = write_adapter(tmp_path / "a", 1)
    assert adapter_of(reader, 1, "poet", path, is_in_place=True) is None
    write_adapter(path, 2)
    assert adapter_of(reader, 2, "poet", path) is None


def test_a_number_that_had_another_adapter_taints_both(reader, tmp_path):
    first, second = write_adapter(tmp_path / "a", 1), write_adapter(tmp_path / "b", 2)
    assert adapter_of(reader, 1, "a", first) is not None
    assert adapter_of(reader, 1, "b", second) is None, "vLLM may have the first one's weights"
    assert adapter_of(reader, 2, "b", second) is None, "vLLM has blocks of it, of either's weights"
    assert adapter_of(reader, 1, "a", first) is None


# Each layer's bytes of a block are found where the configuration says.

BLOCKS, PAGE = 6, 32


class FullAttentionSpec(SimpleNamespace):
    """Of a layer that looks at all tokens."""


class SlidingWindowSpec(SimpleNamespace):
    """Of one that does not."""


LAYERS = [f"model.layers.{layer}.attn" for layer in range(3)]
SPEC = {"page_size_bytes": PAGE, "block_size": 4, "head_size_v": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(**SPEC)
SLIDING = SlidingWindowSpec(**SPEC)


def cache_config(spec: SimpleNamespace = FULL, *, is_packed: bool = False) -> SimpleNamespace:
    """Return a configuration whose blocks have their layers apart, or end to end."""
    placed = SimpleNamespace(
        size=len(LAYERS) * BLOCKS * PAGE,
        layers=list(LAYERS),
        layer_stride=PAGE if is_packed else BLOCKS * PAGE,
        block_stride=len(LAYERS) * PAGE if is_packed else PAGE,
        offset=0,
        host_resident=False,
    )
    group = SimpleNamespace(layer_names=LAYERS, kv_cache_spec=spec)
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
def test_a_page_has_each_layer_s_bytes_of_its_block(is_packed):
    described = cache_config(is_packed=is_packed)
    tensors = caches(described)
    (group,) = read_layout(tensors, described).groups
    tensors[LAYERS[1]][4] += 1  # it is the engine's own memory
    page = torch.cat([region.pages[4] for region in group.own])
    assert torch.equal(page, torch.cat([tensor[4] for tensor in tensors.values()]))
    assert len(group.own) == (1 if is_packed else 3)
    assert [step.layers for region in group.own for step in region.steps] == [(0,), (1,), (2,)]


def test_pages_whose_heads_lie_in_other_blocks_of_kernels_are_other_pages():
    """As FlashInfer's with heads outermost, whose blocks are smaller where it has no cubins."""
    described = cache_config()
    whole = {name: one.view(BLOCKS, 2, 4, 4) for name, one in caches(described).items()}
    halves = {name: one.view(2 * BLOCKS, 2, 2, 4) for name, one in caches(described).items()}
    layouts = [read_layout(each, described).describe() for each in (whole, halves, whole)]
    assert layouts[0] == layouts[2] != layouts[1]


def test_a_latent_cache_is_the_same_on_all_ranks():
    for head_size_v, expected in ((0, (1, 1)), (8, (2, 4))):
        described = cache_config(FullAttentionSpec(**SPEC | {"head_size_v": head_size_v}))
        layout = read_layout(caches(described), described)
        assert (layout.kv_factor, layout.num_parts(4)) == expected


def refused(tensors: dict[str, torch.Tensor], described: SimpleNamespace, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_layout(tensors, described)


def test_layers_that_lie_elsewhere_have_no_cache_or_are_of_several_groups_are_refused():
    described = cache_config()
    tensors = caches(described)
    refused(tensors | {LAYERS[1]: tensors[LAYERS[1]].clone()}, described, "lies elsewhere")
    refused(dict(list(tensors.items())[:2]), described, r"no KV cache for model\.layers\.2")
    described.kv_cache_tensors[0].layers.pop()
    refused(tensors, described, r"no cache for 1 layers, model\.layers\.2")
    described.kv_cache_groups *= 2
    refused(tensors, described, "--disable-hybrid-kv-cache-manager")


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (FullAttentionSpec(**SPEC | {"page_size_bytes": 2 * PAGE}), "do not overlap"),  # BHLNC
        (FullAttentionSpec(**SPEC, non_causal=True), "both directions"),
        (SimpleNamespace(**SPEC, kv_cache_specs={"one": FULL}), "whose layers are alike"),
        (SLIDING, "SlidingWindowSpec"),
        (SimpleNamespace(**SPEC, kv_cache_specs={"one": SLIDING}), "SlidingWindowSpec"),
    ],
)
def test_caches_whose_bytes_are_not_those_of_a_prefix_alone_are_refused(spec, said, is_packed):
    described = cache_config(spec, is_packed=is_packed)
    refused(caches(described), described, said)


# Set-ups that would be served wrongly do not start.


def config(
    *, parallel: dict[str, Any] | None = None, cache: dict[str, Any] | None = None, **more: Any
) -> SimpleNamespace:
    """Return a configuration that is served, with changes."""
    fields = {
        "parallel_config": SimpleNamespace(tensor_parallel_size=2, nnodes=1, **(parallel or {})),
        "cache_config": SimpleNamespace(**{"cache_dtype": "auto", **(cache or {})}),
        "model_config": SimpleNamespace(hf_overrides={}, multimodal_config=None),
        "scheduler_config": SimpleNamespace(policy="fcfs"),
        "device_config": SimpleNamespace(device_type="cuda"),
        "speculative_config": None,
        "kv_transfer_config": SimpleNamespace(kv_role="kv_both"),
    }
    return SimpleNamespace(**{**fields, **more})


CACHING = {"enable_prefix_caching": True}
BY_PRIORITY = SimpleNamespace(policy="priority")
NO_MEDIA_CACHE = SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=0))


def test_what_is_served_starts():
    refuse_unsupported(config(cache={"cache_dtype": "fp8"}, scheduler_config=BY_PRIORITY))
    refuse_unsupported(config(cache=CACHING, model_config=NO_MEDIA_CACHE))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size is 2"),
        ({"parallel": {"decode_context_parallel_size": 4}}, "decode_context_parallel_size is 4"),
        ({"parallel": {"prefill_context_parallel_size": 2}}, "prefill_context_parallel_size is 2"),
        ({"parallel": {"distributed_executor_backend": "external_launcher"}}, "decide alike"),
        ({"device_config": SimpleNamespace(device_type="xpu")}, "NVIDIA"),
        ({"cache": {"cache_dtype": "int8_per_token_head"}}, "scales beside the blocks"),
        ({"cache": {"kv_sharing_fast_prefill": True}}, "switch it off"),
        ({"speculative_config": SimpleNamespace()}, "speculative decoding"),
        ({"model_config": SimpleNamespace(hf_overrides=lambda config: config)}, "a dictionary"),
        ({"model_config": NO_MEDIA_CACHE}, "one picture from another"),
        ({"scheduler_config": BY_PRIORITY, "cache": CACHING}, "nobody computed"),
        ({"kv_transfer_config": SimpleNamespace(kv_role="kv_producer")}, "set it to kv_both"),
    ],
)
def test_what_is_not_served_is_refused_with_a_sentence(changes, said):
    with pytest.raises(ConfigError, match=said):
        refuse_unsupported(config(**changes))


def test_gpus_of_amd_which_torch_calls_cuda_are_refused(monkeypatch):
    monkeypatch.setattr("torch.version.hip", "7.0")
    with pytest.raises(ConfigError, match="NVIDIA"):
        refuse_unsupported(config())
