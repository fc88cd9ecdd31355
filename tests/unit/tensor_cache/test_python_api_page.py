"""The page of the Python API: its examples run, and it has all names."""

import re
from pathlib import Path

import pytest

import kvray
from kvray.actors.shard.shard import Shard
from kvray.config import KVRayConfig
from kvray.tensor_cache.metadata import TensorMetadata

PAGE = (Path(__file__).parents[3] / "docs" / "python_api.md").read_text()
EXAMPLES = [
    example
    for example in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    if "Client" not in example  # tests/ray/test_programs.py runs those
]


def test_every_example_runs_top_to_bottom(
    shard: Shard, config: KVRayConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRAY_ARENA__DIR", str(config.arena.dir))
    monkeypatch.setenv("KVRAY_ARENA__CAPACITY", str(config.arena.capacity))
    names: dict[str, object] = {}
    for example in EXAMPLES:
        exec(example, names)
    assert len(EXAMPLES) >= 6


def test_the_page_names_everything_that_is_public() -> None:
    names = [name for name in kvray.__all__ if not name.startswith("__")]
    assert [name for name in names if f"`{name}" not in PAGE] == []
    assert all(getattr(kvray, name).__name__ == name for name in names)


def test_help_explains_every_argument_of_the_metadata() -> None:
    said = TensorMetadata.__doc__ or ""
    fields = TensorMetadata.__dataclass_fields__
    assert [name for name in fields if f"        {name}: " not in said] == []
