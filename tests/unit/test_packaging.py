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


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names in a wheel that was built from an sdist that was built from this checkout."""
    scratch = tmp_path_factory.mktemp("build")
    for name in ("sdist", "unpacked", "wheel"):
        (scratch / name).mkdir()
    sdist = build(ROOT, scratch / "sdist", "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch / "unpacked", filter="data")
    (source,) = (scratch / "unpacked").iterdir()
    assert (source / ".ci" / "venv.py").exists(), "`make demo` begins with it"
    with zipfile.ZipFile(build(source, scratch / "wheel", "wheel")) as wheel:
        return wheel.namelist()


def test_wheel_from_the_sdist_holds_every_file_of_the_package(wheel_names):
    package = ROOT / "kvray"
    files = [path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    expected = {path.relative_to(ROOT).as_posix() for path in files}
    assert "kvray/py.typed" in expected
    assert expected == {name for name in wheel_names if name.startswith("kvray/")}


def test_wheel_puts_nothing_but_kvray_at_the_top(wheel_names):
    tops = {name.partition("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvray"}


@pytest.mark.parametrize("name", ["LICENSE", "kvray/cli/page/static/uPlot.LICENSE"])
def test_wheel_holds_the_licences(wheel_names, name):
    assert any(one.endswith(f".dist-info/licenses/{name}") for one in wheel_names)


@pytest.mark.parametrize("name", ["actors", "connector"])
def test_link_at_the_top_is_relative(name):
    assert os.readlink(ROOT / name) == f"kvray/{name}"


def test_import_kvray_needs_no_other_package():
    code = "import kvray; print(kvray.__version__, *dir(kvray))"
    printed = run_python(BLOCKED.format(blocked=DEPENDENCIES, code=code))
    assert {"Client", "TensorCache"} <= set(printed.split())


WALK = """
import importlib, pkgutil
for name in ("actors", "cli", "client", "index", "node", "store", "transport"):
    package = importlib.import_module(f"kvray.{name}")
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), f"kvray.{name}."):
        importlib.import_module(module.name)
from kvray.errors import ConfigError
for name in ("tensor_cache", "connector"):
    try:
        importlib.import_module(f"kvray.{name}")
    except ConfigError as error:
        print(error)
"""


def test_a_tier_needs_no_torch_and_what_does_says_what_to_install():
    said = run_python(BLOCKED.format(blocked={"torch"}, code=WALK)).splitlines()
    assert said == ["There is no torch here; run `pip install 'kvray[engine]'`."] * 2


def test_a_bench_that_needs_torch_says_what_to_install():
    code = BLOCKED.format(blocked={"torch"}, code="import kvray.cli; kvray.cli.main()")
    done = run(sys.executable, "-c", code, "bench", "gpu", cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr == "kvray: There is no torch here; run `pip install 'kvray[engine]'`.\n"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    target = tmp_path_factory.mktemp("published")
    return [str(build(ROOT, target, what)) for what in ("sdist", "wheel")]


@pytest.mark.long
def test_what_is_published_passes_twine(published, tmp_path):
    done = run(sys.executable, "-m", "twine", "check", "--strict", *published, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


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


def test_unknown_name_of_kvray_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Klient'"):
        _ = kvray.Klient


MODULES = sorted((ROOT / "kvray").rglob("*.py"))


def test_no_folder_has_more_than_25_modules():
    counts = Counter(one.parent for one in MODULES)
    assert {str(folder): count for folder, count in counts.items() if count > 25} == {}


def test_no_module_has_more_than_600_lines():
    lengths = {one: one.read_text().count("\n") for one in MODULES}
    assert {str(one): length for one, length in lengths.items() if length > 600} == {}


CODE = """
import importlib, pkgutil, sys
package = importlib.import_module({name!r})
for module in pkgutil.walk_packages(getattr(package, "__path__", []), {name!r} + "."):
    if not module.name.endswith(".__main__"):
        importlib.import_module(module.name)
print(*(name for name in sys.modules if name.partition(".")[0] == "ray"))
"""


@pytest.mark.parametrize(
    "name",
    # The last one runs in the engine's process.
    ["node", "connector", "engine", "tensor_cache", "reference", "serve.keeper"],
)
def test_engine_wing_never_imports_ray(name):
    # Its own process: here another test may have imported ray.
    assert run_python(CODE.format(name=f"kvray.{name}")) == ""


@pytest.mark.parametrize("cls", [cls for _, cls in inspect.getmembers(errors, inspect.isclass)])
def test_every_error_is_one_of_kvrays_and_survives_pickling(cls):
    assert issubclass(cls, errors.KVRayError)
    error = cls("The shard on node 3 did not answer.")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(copy) is cls
    assert str(copy) == str(error)


def test_a_config_error_is_caught_as_a_value_error():
    assert issubclass(errors.ConfigError, ValueError)
