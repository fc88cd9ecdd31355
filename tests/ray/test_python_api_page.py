"""The examples of the Python API's page that need a tier on Ray."""

import re
from pathlib import Path
from typing import Any

import pytest

import kvray
from kvray.config import KVRayConfig

PAGE = (Path(__file__).parents[2] / "docs" / "python_api.md").read_text()
EXAMPLES = [
    example
    for example in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    if "Client" in example
]


def test_the_examples_of_the_client_run(
    running: KVRayConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(kvray), "load_config", lambda: running)
    (example,) = EXAMPLES
    names: dict[str, Any] = {}
    exec(example, names)
    assert len(names["status"]["shards"]) == 1
    assert names["contents"]
