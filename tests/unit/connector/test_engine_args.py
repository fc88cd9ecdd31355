"""What is read of an engine's arguments, on every version's surface, and what is refused."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from kvray.connector.engine_args import read_engine_args
from kvray.errors import ConfigError


def args_of(*, cache: dict[str, Any] | None = None, **fields: Any) -> SimpleNamespace:
    config = {"tokens_per_block": 32, "enable_block_reuse": True, **(cache or {})}
    return SimpleNamespace(model="/m", kv_cache_config=SimpleNamespace(**config), **fields)


def test_the_first_versions_keep_tokens_per_block_at_the_top() -> None:
    assert read_engine_args(SimpleNamespace(tokens_per_block=64)).tokens_per_block == 64


def test_a_single_rank_engine_need_not_say_its_rank() -> None:
    args = read_engine_args(args_of(tensor_parallel_size=1))
    assert (args.num_ranks, args.rank) == (1, 0)


def test_the_rank_is_the_mappings() -> None:
    mapping = SimpleNamespace(to_mapping=lambda: SimpleNamespace(rank=1))
    assert read_engine_args(args_of(tensor_parallel_size=2, parallel_config=mapping)).rank == 1


def test_the_engines_own_rank_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    utilities = ModuleType("tensorrt_llm._utils")
    monkeypatch.setitem(sys.modules, "tensorrt_llm._utils", utilities)
    assert read_engine_args(args_of(tensor_parallel_size=2, rank=1)).rank == 1
    vars(utilities)["mpi_rank"] = lambda: 1
    mapping = MagicMock()
    assert read_engine_args(args_of(tensor_parallel_size=2, parallel_config=mapping)).rank == 1
    with pytest.raises(ConfigError, match="rank 1 of an engine whose tensor_parallel_size is 1"):
        read_engine_args(args_of())


def test_the_engines_version_is_part_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("tensorrt_llm")
    vars(package)["__version__"] = "1.2.1rc3"
    monkeypatch.setitem(sys.modules, "tensorrt_llm", package)
    assert read_engine_args(args_of()).engine == "tensorrt_llm 1.2"


def test_an_object_that_has_every_attribute_says_only_what_it_was_told() -> None:
    sloppy = MagicMock()
    sloppy.kv_cache_config.tokens_per_block = 16
    args = read_engine_args(sloppy)
    assert (args.tokens_per_block, args.num_ranks, args.model, args.block_reuse) == (
        16,
        1,
        "",
        True,
    )


def test_equal_engines_have_equal_arguments_and_other_overrides_do_not() -> None:
    assert read_engine_args(args_of()) == read_engine_args(args_of())
    for fields in ({"max_seq_len": 4096}, {"model_kwargs": {"rope_theta": 1}}, {"dtype": "half"}):
        assert read_engine_args(args_of(**fields)) != read_engine_args(args_of())


def test_objects_without_a_plain_value_do_not_give_every_process_its_own_namespace() -> None:
    def one() -> Any:
        return read_engine_args(args_of(quant_config=MagicMock(), model_kwargs=MagicMock()))

    assert one() == one()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline"),
        ({"context_parallel_size": 2}, "context"),
        ({"max_beam_width": 4}, "beam"),
        ({"enable_attention_dp": True}, "attention data"),
        ({"speculative_config": object()}, "speculative"),
        ({"cache": {"host_cache_size": 2**30}}, "host_cache_size"),
        ({"cache": {"max_attention_window": [512, 4096]}}, "window"),
        ({"cache": {"dtype": "nvfp4"}}, "FP4"),
        ({"cache": {"tokens_per_block": None}}, "tokens_per_block"),
        ({"tensor_parallel_size": 2}, "rank"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_sentence(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        read_engine_args(args_of(**fields))
    assert str(refused.value).endswith(".")
    assert "\n" not in str(refused.value)
