"""What is read of an engine's arguments, on every version's surface."""

import enum
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from huggingface_hub import constants

from kvray.connector import base
from kvray.errors import ConfigError
from tests.tiny_checkpoint import write_tiny_checkpoint
from tests.unit.connector.llm_args import DEEPSEEK, LLAMA, args_of, checkpoint, read_args


def test_the_first_versions_keep_tokens_per_block_at_the_top() -> None:
    assert read_args(SimpleNamespace(tokens_per_block=64)).tokens_per_block == 64


def test_a_single_rank_engine_need_not_say_its_rank() -> None:
    args = read_args(args_of(tensor_parallel_size=1))
    assert (args.num_ranks, args.rank) == (1, 0)


def test_the_rank_is_the_mappings() -> None:
    mapping = SimpleNamespace(to_mapping=lambda: SimpleNamespace(rank=1))
    assert read_args(args_of(tensor_parallel_size=2, parallel_config=mapping)).rank == 1


@pytest.mark.parametrize(
    ("per_node", "attention_dp", "is_spread"),
    [
        (None, False, False),
        (2, False, True),
        (4, False, False),
        (8, False, False),
        (2, True, False),
    ],
)
def test_ranks_are_on_several_nodes_if_one_has_fewer_gpus(
    per_node: int | None, attention_dp: bool, is_spread: bool
) -> None:
    args = args_of(
        tensor_parallel_size=4, gpus_per_node=per_node, rank=0, enable_attention_dp=attention_dp
    )
    assert read_args(args).is_spread == is_spread


def test_the_engines_own_rank_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    utilities = ModuleType("tensorrt_llm._utils")
    monkeypatch.setitem(sys.modules, "tensorrt_llm._utils", utilities)
    assert read_args(args_of(tensor_parallel_size=2, rank=1)).rank == 1
    vars(utilities)["mpi_rank"] = lambda: 1
    mapping = MagicMock()
    assert read_args(args_of(tensor_parallel_size=2, parallel_config=mapping)).rank == 1
    with pytest.raises(ConfigError, match="rank 1 of an engine whose tensor_parallel_size is 1"):
        read_args(args_of())


def test_the_engines_version_is_part_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("tensorrt_llm")
    vars(package)["__version__"] = "1.2.1rc3"
    monkeypatch.setitem(sys.modules, "tensorrt_llm", package)
    assert read_args(args_of()).engine == "tensorrt_llm 1.2"


def test_an_object_that_has_every_attribute_says_only_what_it_was_told() -> None:
    sloppy = MagicMock()
    sloppy.kv_cache_config.tokens_per_block = 16
    args = read_args(sloppy)
    assert (args.tokens_per_block, args.num_ranks, args.model, args.block_reuse) == (
        16,
        1,
        "",
        True,
    )
    assert (args.attention_dp, args.is_compiled, args.windows, args.checkpoint.is_mla) == (
        False,
        False,
        (),
        None,
    )


def test_reuse_is_on_unless_it_is_switched_off() -> None:
    args = read_args(args_of(cache={"enable_partial_reuse": False}))
    assert (args.block_reuse, args.partial_reuse) == (True, False)
    assert not read_args(args_of(cache={"enable_block_reuse": False})).block_reuse


def test_a_compiled_model_is_noted() -> None:
    assert read_args(args_of(torch_compile_config=SimpleNamespace())).is_compiled
    assert read_args(args_of(torch_compile_enabled=True)).is_compiled
    assert not read_args(args_of(torch_compile_config=None)).is_compiled


def test_attention_data_parallelism_is_served_where_every_rank_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for half in (base.KvCacheConnectorScheduler, base.KvCacheConnectorWorker):
        monkeypatch.setattr(half, "supports_attention_dp", False, raising=False)
    assert read_args(args_of(enable_attention_dp=True)).attention_dp
    monkeypatch.delattr(base.KvCacheConnectorWorker, "supports_attention_dp")
    with pytest.raises(ConfigError, match="rank 0 only"):
        read_args(args_of(enable_attention_dp=True))


def test_windows_are_those_that_differ() -> None:
    def windows(**cache: Any) -> tuple[int, ...]:
        return read_args(args_of(cache=cache)).windows

    assert windows() == ()
    assert windows(max_attention_window=[4096, 4096]) == (4096,)
    mixed = [4096, 512, 4096]
    for switch in (True, "auto"):
        assert windows(max_attention_window=mixed, use_kv_cache_manager_v2=switch) == (512, 4096)


# What enters the namespace.


@pytest.mark.parametrize(
    "fields",
    [
        {"max_seq_len": 4096},
        {"model_kwargs": {"rope_theta": 1}},
        {"model_kwargs": {"rope_scaling": {"factor": 2.0}}},
        {"dtype": "half"},
        {"revision": "v2"},
        {"load_format": "dummy"},
        {"load_format": enum.IntEnum("LoadFormat", "AUTO DUMMY").DUMMY},
        {"checkpoint_format": "mistral"},
        {"checkpoint_loader": MagicMock},
        {"force_dynamic_quantization": True},
        {"sparse_attention_config": SimpleNamespace(algorithm="rocket", topk=64)},
        {"quant_config": SimpleNamespace(quant_algo="FP8")},
        {"quant_config": SimpleNamespace(exclude_modules=["lm_head"])},
        {"cache": {"max_attention_window": [128]}},
        {"cache": {"sink_token_length": 4}},
        {"attn_backend": "FLASHINFER"},
    ],
)
def test_what_changes_keys_and_values_changes_what_names_them(fields: dict[str, Any]) -> None:
    assert names(args_of(**fields)) != names(args_of())
    assert names(args_of(**fields)) == names(args_of(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"moe_config": SimpleNamespace(backend="TRTLLM")},
        {"allreduce_strategy": "NCCL"},
        {"tokenizer_revision": "v2"},
        {"max_batch_size": 8},
        {"gpus_per_node": 4},
        {"lora_config": SimpleNamespace(lora_target_modules=["attn_q"], lora_dir=[])},
    ],
)
def test_what_leaves_keys_and_values_alone_does_not_part_engines(fields: dict[str, Any]) -> None:
    assert names(args_of(**fields)) == names(args_of())


def test_nothing_that_differs_between_ranks_enters_the_namespace() -> None:
    ranks = [
        SimpleNamespace(to_mapping=lambda rank=rank: SimpleNamespace(rank=rank)) for rank in (0, 1)
    ]
    first, second = (
        args_of(tensor_parallel_size=2, parallel_config=rank, mpi_session=object())
        for rank in ranks
    )
    assert names(first) == names(second)


def test_a_text_and_an_enumeration_of_one_name_are_one() -> None:
    load_format = enum.Enum("LoadFormat", "AUTO DUMMY")
    quantization = enum.Enum("QuantAlgo", {"FP8": "FP8"}, type=str)
    text = args_of(load_format="auto", quant_config=SimpleNamespace(quant_algo="FP8"))
    enumerated = args_of(
        load_format=load_format.AUTO, quant_config=SimpleNamespace(quant_algo=quantization.FP8)
    )
    assert names(text) == names(enumerated)


def test_objects_without_a_plain_value_do_not_give_every_process_its_own_namespace() -> None:
    def one() -> Any:
        return read_args(
            args_of(
                quant_config=MagicMock(),
                model_kwargs=MagicMock(),
                checkpoint_loader=ModuleType("loader"),
            )
        )

    assert one() == one()


def test_adapters_that_replace_the_models_embeddings_are_known_by_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    adapter = write_tiny_checkpoint(tmp_path / "adapter", seed=1)
    args = args_of(lora_config=SimpleNamespace(lora_dir=[str(adapter)]))
    before = names(args)
    assert before == names(args) != names(args_of())
    (adapter / "model.safetensors").rename(adapter / "other.safetensors")
    assert names(args) != before
    with pytest.raises(ConfigError, match="no checkpoint at"):
        names(args_of(lora_config=SimpleNamespace(lora_dir=["/nowhere"])))


def test_how_adapters_are_read_is_told_apart() -> None:
    swapped = args_of(lora_config=SimpleNamespace(swap_gate_up_proj_lora_b_weight=False))
    assert read_args(swapped).adapters != read_args(args_of()).adapters


# What the checkpoint says.


def test_a_checkpoint_tells_its_layers_and_its_kind_of_cache(tmp_path: Path) -> None:
    plain = read_args(args_of(model=checkpoint(tmp_path, LLAMA)))
    assert (
        plain.checkpoint.num_layers,
        plain.checkpoint.is_mla,
        plain.checkpoint.latent_elems,
    ) == (4, False, None)
    latent = read_args(args_of(model=checkpoint(tmp_path, DEEPSEEK)))
    assert (
        latent.checkpoint.num_layers,
        latent.checkpoint.is_mla,
        latent.checkpoint.latent_elems,
    ) == (4, True, 576)
    unknown = read_args(args_of(model="org/model"))
    assert (
        unknown.checkpoint.num_layers,
        unknown.checkpoint.is_mla,
        unknown.checkpoint.latent_elems,
    ) == (None, None, None)


def test_a_model_named_on_the_hub_is_known_by_what_the_engine_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    fetched = tmp_path / "models--org--model" / "snapshots" / "v1"
    fetched.mkdir(parents=True)
    checkpoint(fetched, DEEPSEEK)
    args = read_args(args_of(model="org/model", revision="v1"))
    assert (args.model, args.checkpoint.is_mla, args.checkpoint.num_layers) == (
        "org/model",
        True,
        4,
    )


def test_what_the_engine_replaces_in_the_configuration_counts(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, {"text_config": LLAMA})
    assert read_args(args_of(model=model)).checkpoint.num_layers == 4
    changes = {"text_config": {"num_hidden_layers": 1}}
    args = read_args(args_of(model=model, model_kwargs=changes))
    assert args.checkpoint.num_layers == 1


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_an_unreadable_configuration_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert read_args(args_of(model=str(tmp_path))).checkpoint.is_mla is None


def names(llm_args: Any) -> tuple[str, ...]:
    """Return what the namespace takes from an engine's arguments alone."""
    args = read_args(llm_args)
    return args.quantization, args.overrides, args.attention_backend, args.engine
