"""The page for operators says what is so: its tests exist, its sentences are those of the code."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.trtllm.version import STAND_INS, Version

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "tensorrt_llm.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and "`test_" in line
]
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_row_names_tests_that_exist(row: list[str]) -> None:
    feature, *versions, shown_by = row
    assert feature
    assert len(versions) == len(STAND_INS)
    assert set(versions) <= {"yes", "refused", "not there"}
    names = NAMED.findall(shown_by)
    assert names
    for file, test in names:
        assert test in _tests_of(file)


def test_every_sentence_that_refuses_a_set_up_is_on_the_page(version: Version) -> None:
    refusals = version.module("model.refusals")
    policy = SimpleNamespace(capacity_scheduler_policy="MAX_UTILIZATION")
    transfers = SimpleNamespace(backend="DEFAULT")
    llm_args = SimpleNamespace(scheduler_config=policy, cache_transceiver_config=transfers)
    checkpoint = SimpleNamespace(recurrent="mamba", is_encoder_decoder=True, has_fp4_cache=False)
    page = " ".join(PAGE.split())
    for reasons in (
        refusals._parallelism(llm_args, asks_every_rank=True),
        refusals._decoding(llm_args, None),
        refusals._speculation(llm_args, None),
        refusals._transfers(llm_args),
        refusals._cache(llm_args, None, checkpoint),
        refusals._model(checkpoint),
    ):
        for _, sentence in reasons:
            assert f"- {sentence}" in page


def _tests_of(file: str) -> set[str]:
    tree = ast.parse((HERE / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
