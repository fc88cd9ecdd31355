"""What is read of an engine's arguments, on every version's surface, and what is refused of it."""

import enum
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from huggingface_hub import constants

from kvray.config import KVRayConfig
from kvray.connector.refusals import refuse_flat_pool
from kvray.engine.engine_args import CheckpointConfig
from kvray.engine.shared_state import shared_state_for
from kvray.errors import ConfigError
from tests.kit.connector import (
    BLOCK,
    DEEPSEEK,
    LLAMA,
    args_for,
    checkpoint,
    parallel,
    read_args,
    stand_in,
)
from tests.tiny_checkpoint import write_tiny_checkpoint

V2 = "use_kv_cache_manager_v2"


def test_size_of_blocks_and_rank_are_where_the_version_has_them(monkeypatch):
    assert read_args(SimpleNamespace(tokens_per_block=64)).tokens_per_block == 64
    one, two = args_for(tensor_parallel_size=1), {"tensor_parallel_size": 2}
    assert (read_args(one).num_ranks, read_args(one).rank) == (1, 0)
    assert read_args(args_for(**two, parallel_config=parallel(1))).rank == 1
    stand_in(monkeypatch, "tensorrt_llm._utils")
    assert read_args(args_for(**two, rank=1)).rank == 1
    stand_in(monkeypatch, "tensorrt_llm._utils", mpi_rank=lambda: 1)
    assert read_args(args_for(**two, parallel_config=MagicMock())).rank == 1, "it goes first"
    with pytest.raises(ConfigError, match="rank 1 of an engine whose tensor_parallel_size is 1"):
        read_args(args_for())


@pytest.mark.parametrize(
    ("fields", "is_spread"),
    [
        ({}, False),
        ({"gpus_per_node": 2}, True),
        ({"gpus_per_node": 4}, False),
        ({"gpus_per_node": 2, "enable_attention_dp": True}, False),
    ],
)
def test_ranks_are_on_several_nodes_if_one_has_fewer_gpus(fields, is_spread):
    assert read_args(args_for(tensor_parallel_size=4, rank=0, **fields)).is_spread == is_spread


@pytest.mark.parametrize(
    ("version", "named"),
    [
        *((one, "1.2") for one in ("1.2.1", "1.2", "1.2.1+cu13")),
        *((one, one) for one in ("1.3.0rc11", "1.4.0.dev5+g1a2b3c", "1.2.1.post1")),
    ],
)
def test_the_engines_version_is_part_of_its_name(monkeypatch, version, named):
    stand_in(monkeypatch, "tensorrt_llm", __version__=version)
    assert read_args(args_for()).engine == f"tensorrt_llm {named}"


def test_an_object_that_has_every_attribute_says_only_what_it_was_told():
    sloppy = MagicMock()
    sloppy.kv_cache_config.tokens_per_block = 16
    args = read_args(sloppy)
    assert (args.tokens_per_block, args.num_ranks, args.model, args.windows) == (16, 1, "", ())
    assert (args.block_reuse, args.attention_dp, args.is_compiled) == (True, False, False)
    assert args.checkpoint.is_mla is None


@pytest.mark.parametrize(
    ("policy", "is_so"),
    [("per_request", True), ("per_conversation", True), ("all_reusable", False), (None, False)],
)
def test_each_pass_waits_for_its_saves_where_begun_blocks_are_copied_behind_it(policy, is_so):
    cache = {"enable_partial_reuse": False, "block_reuse_config": SimpleNamespace(policy=policy)}
    assert read_args(args_for(cache=cache)).has_writes_aside == is_so


RESOURCES = "tensorrt_llm._torch.pyexecutor.resource_manager"


class Streamless:
    def __init__(self, kv_cache_config: object) -> None: ...


class Streaming:
    def __init__(self, kv_cache_config: object, execution_stream: object = None) -> None: ...


def test_partly_reused_pages_may_be_written_where_layers_wait_for_their_copies(monkeypatch):
    assert read_args(args_for()).owns_partial_blocks
    for manager in (Streamless, Streaming):
        stand_in(monkeypatch, RESOURCES, KVCacheManager=manager)
        assert read_args(args_for()).owns_partial_blocks == (manager is Streaming)
    for changes in ({"torch_compile_enabled": True}, {"cache": {"enable_partial_reuse": False}}):
        assert not read_args(args_for(**changes)).owns_partial_blocks


def test_streams_stall_before_no_pass_of_versions_that_fill_its_inputs_again(monkeypatch):
    assert not read_args(args_for()).refills_inputs
    stand_in(monkeypatch, RESOURCES, KVCacheManager=Streaming)
    assert read_args(args_for()).refills_inputs
    assert not read_args(args_for(disable_overlap_scheduler=True)).refills_inputs
    with monkeypatch.context() as patch:
        waits = type("", (), {"wait_for_input_copy": None})
        engine = "tensorrt_llm._torch.pyexecutor.model_engine"
        stand_in(patch, engine, PyTorchModelEngine=waits)
        assert not read_args(args_for()).refills_inputs
    monkeypatch.setattr(Streaming, "_stage_block_offsets_for_copy", None, raising=False)
    assert not read_args(args_for()).refills_inputs


def test_a_compiled_model_is_noted():
    compiled = {"torch_compile_config": SimpleNamespace(), "torch_compile_enabled": True}
    for name, value in {**compiled, "prefill_cuda_graph_backend": "breakable"}.items():
        assert read_args(args_for(**{name: value})).is_compiled, name
    plain = {"torch_compile_config": None, "prefill_cuda_graph_backend": "disabled"}
    assert not read_args(args_for(**plain)).is_compiled


def test_windows_are_those_that_differ():
    def windows(max_seq_len: int | None = None, **cache: Any) -> tuple[int, ...]:
        return read_args(args_for(cache=cache, max_seq_len=max_seq_len)).windows

    assert windows() == ()
    assert windows(max_attention_window=[4096, 4096]) == (4096,)
    assert windows(max_attention_window=[8192], max_seq_len=4096) == (), "it reaches everywhere"
    mixed = [4096, 512, 4096]
    for switch in (True, "auto"):
        assert windows(max_attention_window=mixed, **{V2: switch}) == (512, 4096)


# What enters the namespace, beside what test_key_hygiene.py has.


@pytest.mark.parametrize(
    "fields",
    [
        {"max_seq_len": 4096},
        {"model_kwargs": {"rope_scaling": {"factor": 2.0}}},
        {"dtype": "half"},
        {"load_format": "dummy"},
        {"load_format": enum.IntEnum("LoadFormat", "AUTO DUMMY").DUMMY},
        {"checkpoint_format": "mistral"},
        {"checkpoint_loader": MagicMock},
        {"force_dynamic_quantization": True},
        {"sparse_attention_config": SimpleNamespace(algorithm="rocket", topk=64)},
        {"quant_config": SimpleNamespace(exclude_modules=["lm_head"])},
        {"cache": {"max_attention_window": [128]}},
        {"cache": {"sink_token_length": 4}},
    ],
)
def test_what_changes_keys_and_values_changes_what_names_them(fields):
    assert names(args_for(**fields)) != names(args_for())
    assert names(args_for(**fields)) == names(args_for(**fields))


@pytest.mark.parametrize(
    ("fields", "way"),
    [
        ({"load_format": enum.IntEnum("LoadFormat", "AUTO DUMMY VISION_ONLY GMS").GMS}, "GMS"),
        ({"checkpoint_format": "MX"}, "MX"),
        ({"checkpoint_loader": SimpleNamespace(checkpoint_format="own")}, "own"),
    ],
)
def test_weights_that_are_not_read_from_the_checkpoint_need_a_name(fields, way):
    with pytest.raises(ConfigError, match=rf"come by {way} .* connector\.model_key"):
        shared_state_for(object(), read_args(args_for(**fields)), KVRayConfig())
    usual = {"load_format": "auto", "checkpoint_format": "mistral", "checkpoint_loader": None}
    assert read_args(args_for(**usual)).weights_from == ""


def test_engines_whose_environment_quantizes_otherwise_are_parted(monkeypatch):
    before = names(args_for())
    monkeypatch.setenv("OVERRIDE_QUANT_ALGO", "W4A8_MXFP4_MXFP8")
    assert names(args_for()) == names(args_for()) != before


def test_what_leaves_keys_and_values_alone_does_not_part_engines():
    fields = {
        "moe_config": SimpleNamespace(backend="TRTLLM"),
        "allreduce_strategy": "NCCL",
        "tokenizer_revision": "v2",
        "max_batch_size": 8,
        "gpus_per_node": 4,
        "lora_config": SimpleNamespace(lora_target_modules=["attn_q"], lora_dir=[]),
    }
    assert names(args_for(**fields)) == names(args_for())


def test_a_text_and_an_enumeration_of_one_name_are_one():
    load_format = enum.Enum("LoadFormat", "AUTO DUMMY").AUTO
    quant_algo = enum.Enum("QuantAlgo", {"FP8": "FP8"}, type=str).FP8
    text, enumerated = (
        names(args_for(load_format=one, quant_config=SimpleNamespace(quant_algo=other)))
        for one, other in (("auto", "FP8"), (load_format, quant_algo))
    )
    assert text == enumerated


def test_adapters_that_replace_embeddings_are_known_by_their_bytes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    adapter = write_tiny_checkpoint(tmp_path / "adapter", seed=1)
    args = args_for(lora_config=SimpleNamespace(lora_dir=[str(adapter)]))
    before = names(args)
    assert before == names(args) != names(args_for())
    (adapter / "model.safetensors").rename(adapter / "other.safetensors")
    assert names(args) != before
    with pytest.raises(ConfigError, match="no checkpoint at"):
        names(args_for(lora_config=SimpleNamespace(lora_dir=["/nowhere"])))
    swapped = args_for(lora_config=SimpleNamespace(swap_gate_up_proj_lora_b_weight=False))
    assert read_args(swapped).adapters != read_args(args_for()).adapters


# What the checkpoint says.


def test_a_model_named_on_the_hub_is_known_by_what_the_engine_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    fetched = tmp_path / "models--org--model" / "snapshots" / "v1"
    fetched.mkdir(parents=True)
    checkpoint(fetched, DEEPSEEK)
    args = read_args(args_for(model="org/model", revision="v1"))
    found = args.checkpoint
    assert (args.model, found.num_layers, found.latent_elems) == ("org/model", 4, 576)
    assert read_args(args_for(model="org/model")).checkpoint == CheckpointConfig()


def test_what_the_engine_replaces_in_the_configuration_counts(tmp_path):
    model = checkpoint(tmp_path, {"text_config": LLAMA})
    assert read_args(args_for(model=model)).checkpoint.num_layers == 4
    changes = {"text_config": {"num_hidden_layers": 1}}
    args = read_args(args_for(model=model, model_kwargs=changes))
    assert args.checkpoint.num_layers == 1


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_an_unreadable_configuration_says_nothing(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    assert read_args(args_for(model=str(tmp_path))).checkpoint.is_mla is None


def names(llm_args: Any) -> tuple[str, ...]:
    """Return what the namespace takes from an engine's arguments alone."""
    args = read_args(llm_args)
    return args.quantization, args.overrides, args.attention_backend, args.engine


# What is refused beside what tests/trtllm/test_start_up.py has refused on each version's surface.


@contextmanager
def is_refused(named: str) -> Iterator[None]:
    with pytest.raises(ConfigError, match=named) as refused:
        yield
    assert re.fullmatch(r"(?!.*\. ).*\.", str(refused.value)), "one sentence"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"decoding_config": SimpleNamespace(medusa_choices=[[0]])}, "speculative"),
        ({"sparse_attention_config": SimpleNamespace(sparse_disable_index_value=False)}, "index"),
        ({"cache": {"max_attention_window": [1, 2], V2: False}}, f"{V2} to true"),
        ({"cache": {"max_attention_window": [-1, 8], V2: True}}, "recurrent"),
        ({"quant_config": SimpleNamespace(kv_cache_quant_algo="NVFP4")}, "FP4"),
        ({"cache": {"tokens_per_block": None}}, "tokens_per_block"),
        ({"tensor_parallel_size": 2}, "which one this is"),
        ({"scheduler_config": SimpleNamespace(capacity_scheduler_policy="STATIC")}, "NO_EVICT"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_sentence(fields, named):
    with is_refused(named):
        read_args(args_for(**fields))


@pytest.mark.parametrize("policy", ["GUARANTEED_NO_EVICT", 7, None])
@pytest.mark.parametrize("windows", [None, [8, 8]])
def test_what_can_be_served_is_not_refused(policy, windows):
    read_args(
        args_for(
            scheduler_config=SimpleNamespace(capacity_scheduler_policy=policy),
            orchestrator_type="ray",
            decoding_config=SimpleNamespace(medusa_choices=None),
            max_beam_width=None,
            quant_config=SimpleNamespace(kv_cache_quant_algo="FP8"),
            cache={"host_cache_size": 0, "disk_cache_size": None, "max_attention_window": windows},
        )
    )


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types"),
        ({"layer_types": ["conv", "full_attention"]}, "layer_types"),
        ({"layers_block_type": ["mamba", "attention"]}, "layers_block_type"),
        ({"mamba_d_state": 128}, "mamba_d_state"),
        ({"ssm_state_size": 16}, "ssm_state_size"),
        ({"text_config": LLAMA | {"linear_attn_config": {"kda_layers": [1]}}}, "linear_attn"),
        ({"model_type": "qwen3_next"}, "model_type"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 4}}}, "FP4"),
    ],
)
def test_models_whose_cache_is_more_than_blocks_are_refused(tmp_path, config, named):
    with is_refused(named):
        read_args(args_for(model=checkpoint(tmp_path, LLAMA | config)))


def test_models_with_attention_alone_are_not_refused(tmp_path):
    plain = LLAMA | {
        "layer_types": ["sliding_attention", "full_attention", "chunked_attention"],
        "layers_block_type": ["attention"],
        "mamba_d_state": None,
        "is_encoder_decoder": False,
        "sliding_window": 4096,
        "quantization_config": {"kv_cache_scheme": {"num_bits": 8}},
    }
    seeing = {"text_config": plain, "vision_config": {"model_type": "pixtral"}}
    for config in (plain, plain | {"model_type": "mistral3"} | seeing):
        read_args(args_for(model=checkpoint(tmp_path, config)))


def test_the_quantisation_beside_a_checkpoint_counts_unless_the_engine_replaces_it(tmp_path):
    quantization = {"quantization": {"kv_cache_quant_algo": "NVFP4"}}
    model = checkpoint(tmp_path, LLAMA, hf_quant_config=quantization)
    for dtype in ("auto", "bfloat16"):
        with pytest.raises(ConfigError, match="FP4"):
            read_args(args_for(model=model, cache={"dtype": dtype}))
    read_args(args_for(model=model, cache={"dtype": "fp8"}))


# The pool of the first cache manager.


def refuse(tmp_path: Path, config: dict[str, Any] | None, shape: tuple[int, ...], **fields: Any):
    model = "" if config is None else checkpoint(tmp_path, config)
    refuse_flat_pool(read_args(args_for(model=model, **fields)), shape)


def sparse(algorithm: str) -> dict[str, Any]:
    return {"sparse_attention_config": SimpleNamespace(algorithm=algorithm)}


THREE_OF_FOUR = [{"attention": {"no_op": layer == 1}} for layer in range(4)]


@pytest.mark.parametrize(
    ("config", "shape", "fields"),
    [
        (LLAMA, (64, 4, 2, 32 * BLOCK), {}),
        (LLAMA | {"block_configs": THREE_OF_FOUR}, (64, 3, 2, 1024), {}),
        (DEEPSEEK, (64, 4, 1, 576 * BLOCK), {}),
        (LLAMA, (64, 4, 1, 576 * 64), {}),
        (None, (64, 4, 1, 576 * BLOCK), {}),
        (None, (64, 7, 1, 1000), {}),
        (None, (64, 4, 1, 1024), sparse("skip_softmax")),
    ],
)
def test_a_pool_of_all_layers_is_served(tmp_path, config, shape, fields):
    refuse(tmp_path, config, shape, **fields)


@pytest.mark.parametrize(
    ("config", "shape", "fields", "named"),
    [
        *(
            (None, shape, {}, "shape")
            for shape in ((64, 4, 2), (64, 4, 3, 1024), (64, 4, 0, 1024), (64, 4, 2, 8, 8))
        ),
        (LLAMA, (64, 3, 2, 1024), {}, "3 of the model's 4 layers"),
        (None, (64, 4, 1, 1024), {"cache": {"max_attention_window": [5, 6], V2: "auto"}}, V2),
        (None, (64, 4, 1, 1024), sparse("dsa"), V2),
        (DEEPSEEK | {"index_topk": 2048}, (64, 4, 1, 1024), {}, V2),
        (DEEPSEEK, (64, 4, 1, 576 * 64), {}, "tokens_per_block to 64"),
        (None, (64, 4, 1, 576 * 64), {}, "tokens_per_block to 64"),
    ],
)
def test_a_pool_of_another_form_is_refused(tmp_path, config, shape, fields, named):
    with is_refused(named):
        refuse(tmp_path, config, shape, **fields)
