"""The package: what is in it, how large its parts are, and what it imports."""

import inspect
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvray
from kvray import errors
from tests.forks import run

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kvray"

DEPENDENCIES = {
    *("msgpack", "numpy", "psutil", "pydantic", "pydantic_settings", "ray", "rich", "typer"),
    *("torch", "xxhash", "yaml"),
}

BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is not installed", name=name)

sys.meta_path.insert(0, Blocker())
{code}
"""


def run_python(code: str) -> str:
    done = run(sys.executable, "-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def build(source: Path, target: Path, what: str) -> Path:
    # The tools are those of this environment, so that the test needs no network.
    command = (sys.executable, "-m", "build", "--no-isolation", f"--{what}")
    done = run(*command, "--outdir", target, source, cwd=target)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = target.glob("*.whl" if what == "wheel" else "*.tar.gz")
    return built


def test_wheel_from_the_sdist_holds_every_file_of_the_package_the_licences_and_no_other(tmp_path):
    for name in ("sdist", "unpacked", "wheel"):
        (tmp_path / name).mkdir()
    with tarfile.open(build(ROOT, tmp_path / "sdist", "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    assert (source / ".ci" / "venv.py").exists(), "`make demo` begins with it"
    with zipfile.ZipFile(build(source, tmp_path / "wheel", "wheel")) as wheel:
        names = wheel.namelist()
    files = [one for one in PACKAGE.rglob("*") if one.is_file() and one.suffix != ".pyc"]
    expected = {path.relative_to(ROOT).as_posix() for path in files}
    assert "kvray/py.typed" in expected
    assert expected == {name for name in names if ".dist-info/" not in name}
    for name in ("LICENSE", "kvray/cli/page/static/uPlot.LICENSE"):
        assert any(one.endswith(f".dist-info/licenses/{name}") for one in names)
    for name in ("actors", "connector"):
        assert os.readlink(ROOT / name) == f"kvray/{name}"


def test_import_kvray_needs_no_other_package_and_what_it_has_not_is_an_attribute_error():
    code = "import kvray; print(kvray.__version__, *dir(kvray))"
    printed = run_python(BLOCKED.format(blocked=DEPENDENCIES, code=code))
    assert {"Client", "TensorCache"} <= set(printed.split())
    with pytest.raises(AttributeError, match="no attribute 'Klient'"):
        _ = kvray.Klient


NO_TORCH = "There is no torch here; run `pip install 'kvray[engine]'`."
WALK = """
import importlib, pkgutil, sys
for name in {names!r}:
    package = importlib.import_module(f"kvray.{{name}}")
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), f"kvray.{{name}}."):
        if not module.name.endswith(".__main__"):
            importlib.import_module(module.name)
"""
TRY = """
from kvray.errors import ConfigError
for name in ("tensor_cache", "connector"):
    try:
        importlib.import_module(f"kvray.{name}")
    except ConfigError as error:
        print(error)
"""


def test_a_tier_needs_no_torch_and_what_does_says_what_to_install():
    names = ("actors", "cli", "client", "index", "node", "store", "transport")
    code = WALK.format(names=names) + TRY
    said = run_python(BLOCKED.format(blocked={"torch"}, code=code)).splitlines()
    assert said == [NO_TORCH] * 2
    code = BLOCKED.format(blocked={"torch"}, code="import kvray.cli; kvray.cli.main()")
    done = run(sys.executable, "-c", code, "bench", "gpu", cwd=ROOT)
    assert (done.returncode, done.stderr) == (2, f"kvray: {NO_TORCH}\n")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The sdist and the wheel of this checkout, which pass twine."""
    target = tmp_path_factory.mktemp("published")
    built = [str(build(ROOT, target, what)) for what in ("sdist", "wheel")]
    done = run(sys.executable, "-m", "twine", "check", "--strict", *built, cwd=target)
    assert done.returncode == 0, done.stdout + done.stderr
    return built


@pytest.fixture
def shm() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="k-") as made:
        yield Path(made)


@pytest.mark.long
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_wheel_and_sdist_serve_a_tier_without_torch_in_a_bare_environment(
    published, version, tmp_path, shm
):
    """With the requirements that pip finds today, for each Python that this machine has.

    Ray's files are beside the arena: their paths must be short.
    """
    python = sys.executable if sys.version.startswith(f"{version}.") else f"python{version}"
    make = [shutil.which(python) or "false", "-m", "venv", tmp_path / "bare"]
    if subprocess.run(make, check=False).returncode:
        pytest.skip(f"there is no {python} with venv")
    sizes = {"KVRAY_ARENA__CAPACITY": "16MiB", "KVRAY_ARENA__DIR": str(shm)}
    environ = {**os.environ, **sizes, "KVRAY_CLUSTER_NAME": "bare", "TMPDIR": str(shm)}
    environ.pop("PYTHONPATH", None)

    def say(*command: str) -> str:
        done = run(tmp_path / "bare/bin/python", "-m", *command, cwd=tmp_path, env=environ)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    sdist, wheel = published
    say("pip", "install", "-q", wheel)
    assert "\ntorch " not in say("pip", "list")
    for again in ((), ("--force-reinstall", "--no-deps", sdist)):
        if again:
            say("pip", "install", "-q", *again)
        assert "Run a tier" in say("kvray", "--help")
        try:
            say("kvray", "up")
            assert "serving" in say("kvray", "status")
        finally:
            say("kvray", "down")


def test_no_folder_has_more_than_25_modules_and_no_module_more_than_600_lines():
    modules = sorted(PACKAGE.rglob("*.py"))
    counts = Counter(one.parent for one in modules)
    assert {str(folder): count for folder, count in counts.items() if count > 25} == {}
    lengths = {one: one.read_text().count("\n") for one in modules}
    assert {str(one): length for one, length in lengths.items() if length > 600} == {}


@pytest.mark.parametrize(
    "name",
    # The last one runs in the engine's process.
    ["node", "connector", "engine", "tensor_cache", "reference", "serve.keeper"],
)
def test_engine_wing_never_imports_ray(name):
    # Its own process: here another test may have imported ray.
    loaded = 'print(*(name for name in sys.modules if name.partition(".")[0] == "ray"))'
    assert run_python(WALK.format(names=[name]) + loaded) == ""


def test_every_error_is_one_of_kvrays_and_survives_pickling():
    for _, cls in inspect.getmembers(errors, inspect.isclass):
        assert issubclass(cls, errors.KVRayError)
        error = cls("The shard on node 3 did not answer.")
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301
        assert (type(copy), str(copy)) == (cls, str(error))
    assert issubclass(errors.ConfigError, ValueError)
