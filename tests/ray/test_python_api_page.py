"""The examples of the Python API's page that need a tier on Ray, and the tensor cache's."""

import re
import subprocess
import sys
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


EXAMPLE = Path(__file__).parents[2] / "examples" / "tensor_cache.py"


@pytest.mark.long
@pytest.mark.ray
def test_the_tensor_cache_example_says_the_same_from_the_tier(tmp_path: Path) -> None:
    config = tmp_path / "kvray.yaml"
    config.write_text("cluster_name: tensors\narena: {capacity: 128MiB, slab: 16MiB}\n")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--config", str(config)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    first, second, verdict = done.stdout.splitlines()
    assert first.startswith("first process: 0 of 1440 tokens")
    assert second.startswith("second process: 1408 of 1440 tokens")
    assert verdict == "Both said the same."
