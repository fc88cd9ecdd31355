"""The package stays small enough to find one's way, and imports no more than it needs."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import kvray

PACKAGE = Path(kvray.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


def test_no_folder_has_more_than_25_modules() -> None:
    counts = {folder: sum(one.parent == folder for one in MODULES) for folder in _folders()}
    assert {str(folder): count for folder, count in counts.items() if count > 25} == {}


def test_no_module_has_more_than_600_lines() -> None:
    lengths = {one: one.read_text().count("\n") for one in MODULES}
    assert {str(one): length for one, length in lengths.items() if length > 600} == {}


def _folders() -> set[Path]:
    return {one.parent for one in MODULES}


ROOT = Path(__file__).parents[2]

ENGINE_WING = (
    "kvray.node",
    "kvray.connector",
    "kvray.engine",
    "kvray.tensor_cache",
    "kvray.reference",
    "kvray.serve.trtllm_child",  # runs in the engine's process
)

CODE = """
import importlib, pkgutil, sys
package = importlib.import_module({name!r})
for module in pkgutil.walk_packages(getattr(package, "__path__", []), {name!r} + "."):
    if not module.name.endswith(".__main__"):
        importlib.import_module(module.name)
print(*(name for name in sys.modules if name.partition(".")[0] == "ray"))
"""


@pytest.mark.parametrize("name", ENGINE_WING)
def test_engine_wing_never_imports_ray(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"there is no {name} yet")
    # Its own process: here another test may have imported ray.
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(name=name)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
