"""Which engines are refused at the start, each with a sentence that says what to change."""

import enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvray.connector.model.engine_args import EngineArgs
from kvray.connector.model.refusals import refuse_flat_pool
from kvray.errors import ConfigError
from tests.unit.connector.llm_args import DEEPSEEK, LLAMA, args_of, checkpoint, read_args


class Policy(enum.Enum):
    """As TensorRT-LLM's own, an enumeration in some versions and a text in others."""

    MAX_UTILIZATION = 0
    GUARANTEED_NO_EVICT = 1


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size to 1"),
        ({"context_parallel_size": 2}, "context_parallel_size to 1"),
        ({"max_beam_width": 4}, "max_beam_width to 1"),
        ({"orchestrator_type": "ray", "tensor_parallel_size": 2}, "orchestrator_type"),
        ({"speculative_config": object()}, "speculative_config"),
        ({"decoding_config": SimpleNamespace(medusa_choices=[[0]])}, "speculative"),
        (
            {
                "speculative_config": SimpleNamespace(decoding_type="NGram"),
                "cache": {"use_kv_cache_manager_v2": "auto"},
            },
            "use_kv_cache_manager_v2 to false",
        ),
        ({"cache_transceiver_config": SimpleNamespace(backend="UCX")}, "kv_connector_config"),
        (
            {
                "cache_transceiver_config": SimpleNamespace(
                    backend="UCX", enable_pipelined_transfer=True
                ),
                "disable_overlap_scheduler": True,
            },
            "enable_pipelined_transfer to false",
        ),
        ({"attn_backend": "VANILLA"}, "attn_backend to TRTLLM"),
        ({"kv_cache_compression_config": object()}, "kv_cache_compression_config"),
        ({"sparse_attention_config": SimpleNamespace(sparse_disable_index_value=False)}, "index"),
        ({"cache": {"host_cache_size": 2**30}}, "host_cache_size"),
        ({"cache": {"disk_cache_size": 2**30}}, "disk_cache_size"),
        ({"cache": {"max_attention_window": [512, 4096]}}, "window"),
        (
            {"cache": {"max_attention_window": [1, 2], "use_kv_cache_manager_v2": False}},
            "use_kv_cache_manager_v2 to true",
        ),
        (
            {"cache": {"max_attention_window": [-1, 8], "use_kv_cache_manager_v2": True}},
            "recurrent",
        ),
        ({"cache": {"enable_swa_scratch_reuse": True}}, "enable_swa_scratch_reuse to false"),
        ({"cache": {"dtype": "nvfp4"}}, "dtype to fp8"),
        ({"quant_config": SimpleNamespace(kv_cache_quant_algo="NVFP4")}, "FP4"),
        ({"cache": {"tokens_per_block": None}}, "tokens_per_block"),
        ({"tensor_parallel_size": 2}, "which one this is"),
        *(
            ({"scheduler_config": SimpleNamespace(capacity_scheduler_policy=policy)}, "NO_EVICT")
            for policy in (Policy.MAX_UTILIZATION, "STATIC_BATCH")
        ),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_sentence(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        read_args(args_of(**fields))
    assert_is_sentence(refused.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"scheduler_config": SimpleNamespace(capacity_scheduler_policy=policy)}
        for policy in (Policy.GUARANTEED_NO_EVICT, "GUARANTEED_NO_EVICT", 7, None)
    ]
    + [
        {
            "scheduler_config": SimpleNamespace(capacity_scheduler_policy="MAX_UTILIZATION"),
            "cache": {"use_kv_cache_manager_v2": True},
        },
        {"orchestrator_type": "ray"},
        {"decoding_config": SimpleNamespace(medusa_choices=None)},
        {"max_beam_width": None},
        {"cache": {"host_cache_size": 0, "disk_cache_size": None, "max_attention_window": [8, 8]}},
        {"cache": {"dtype": "fp8"}, "quant_config": SimpleNamespace(kv_cache_quant_algo="FP8")},
    ],
)
def test_what_can_be_served_is_not_refused(fields: dict[str, Any]) -> None:
    read_args(args_of(**fields))


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
def test_models_whose_cache_is_more_than_blocks_are_refused_in_one_sentence(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        read_args(args_of(model=checkpoint(tmp_path, LLAMA | config)))
    assert_is_sentence(refused.value)


@pytest.mark.parametrize(
    "config",
    [
        {"layer_types": ["sliding_attention", "full_attention", "chunked_attention"]},
        {"layers_block_type": ["attention"], "mamba_d_state": None},
        {"is_encoder_decoder": False, "sliding_window": 4096},
        {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}},
        {
            "model_type": "mistral3",
            "text_config": LLAMA,
            "vision_config": {"model_type": "pixtral"},
        },
    ],
)
def test_models_with_attention_alone_are_not_refused(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    read_args(args_of(model=checkpoint(tmp_path, LLAMA | config)))


def test_the_quantisation_beside_a_checkpoint_counts_unless_the_engine_replaces_it(
    tmp_path: Path,
) -> None:
    quantization = {"quantization": {"kv_cache_quant_algo": "NVFP4"}}
    model = checkpoint(tmp_path, LLAMA, hf_quant_config=quantization)
    for dtype in ("auto", "bfloat16"):
        with pytest.raises(ConfigError, match="FP4"):
            read_args(args_of(model=model, cache={"dtype": dtype}))
    read_args(args_of(model=model, cache={"dtype": "fp8"}))


# The pool of the first cache manager.


def flat(model: str = "", **fields: Any) -> EngineArgs:
    return read_args(args_of(model=model, **fields))


def test_a_pool_of_all_layers_is_served(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, LLAMA)
    refuse_flat_pool(flat(model), (64, 4, 2, 32 * 32))
    refuse_flat_pool(flat(), (64, 7, 1, 1000))


@pytest.mark.parametrize(
    "shape", [(64, 4, 2), (64, 4, 3, 1024), (64, 4, 0, 1024), (64, 4, 2, 8, 8)]
)
def test_a_pool_of_another_form_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="shape") as refused:
        refuse_flat_pool(flat(), shape)
    assert_is_sentence(refused.value)


def test_a_pool_without_some_of_the_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="3 of the model's 4 layers") as refused:
        refuse_flat_pool(flat(checkpoint(tmp_path, LLAMA)), (64, 3, 2, 1024))
    assert_is_sentence(refused.value)


def test_layers_whose_attention_was_taken_out_are_not_missed(tmp_path: Path) -> None:
    blocks = [{"attention": {"no_op": no_op}} for no_op in (False, True, False, False)]
    model = checkpoint(tmp_path, LLAMA | {"block_configs": blocks})
    refuse_flat_pool(flat(model), (64, 3, 2, 1024))


def test_one_pool_is_refused_where_there_must_be_several(tmp_path: Path) -> None:
    windows = {"max_attention_window": [512, 4096], "use_kv_cache_manager_v2": "auto"}
    sparse = SimpleNamespace(algorithm="dsa")
    indexed = checkpoint(tmp_path, DEEPSEEK | {"index_topk": 2048})
    for args in (flat(cache=windows), flat(sparse_attention_config=sparse), flat(indexed)):
        with pytest.raises(ConfigError, match="use_kv_cache_manager_v2") as refused:
            refuse_flat_pool(args, (64, 4, 1, 1024))
        assert_is_sentence(refused.value)
    harmless = SimpleNamespace(algorithm="skip_softmax")
    refuse_flat_pool(flat(sparse_attention_config=harmless), (64, 4, 1, 1024))


def test_blocks_of_another_size_than_the_engine_was_told_are_refused(tmp_path: Path) -> None:
    args = flat(checkpoint(tmp_path, DEEPSEEK))
    refuse_flat_pool(args, (64, 4, 1, 576 * 32))
    with pytest.raises(ConfigError, match="tokens_per_block to 64") as refused:
        refuse_flat_pool(args, (64, 4, 1, 576 * 64))
    assert_is_sentence(refused.value)


def assert_is_sentence(error: Exception) -> None:
    text = str(error)
    assert text.endswith(".")
    assert "\n" not in text
    assert ". " not in text
