"""What this machine gives a process, looked at for real."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvray.cli.doctor import machine
from kvray.config import KVRayConfig, load_config


@pytest.fixture
def config() -> KVRayConfig:
    return load_config(environ={})


@pytest.fixture
def files_limit() -> Iterator[None]:
    """Few files that may be open, as some containers have it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_this_machine_has_no_fault(config: KVRayConfig) -> None:
    found = {one.check: one for one in machine.machine_findings(config)}
    assert not [one for one in found.values() if one.verdict == "fault"]
    assert found["software"].says.startswith("kvray ")
    assert found["connector"].says.endswith("without Ray")
    assert all(one.fix for one in found.values() if one.verdict == "hint")


def test_few_open_files_are_a_hint(files_limit: None, config: KVRayConfig) -> None:
    one = machine._open_files()
    assert one.verdict == "hint"
    assert "ulimit -n" in one.fix


def test_nixl_is_not_tried_where_it_is_not_configured() -> None:
    config = load_config(overrides={"staging.transports": ["object_ref"]}, environ={})
    assert machine._nixl(config).verdict == "skipped"


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
        ("raise ImportError('libcore.so is broken')", "does not load (libcore.so is broken)"),
        ("import a_library_of_it", "does not load (No module named 'a_library_of_it')"),
    ],
)
def test_nixl_that_is_broken_is_not_said_to_be_missing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: KVRayConfig,
    module: str,
    words: str,
) -> None:
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text("")
    (tmp_path / "nixl" / "_bindings.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    one = machine._nixl(config)
    assert words in one.says
    assert "pip install" not in one.says + one.fix


def test_connector_that_cannot_be_imported_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch is broken here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    one = machine._connector()
    assert one.verdict == "fault"
    assert "torch is broken here" in one.says


def test_locked_memory_matters_to_rdma_only(
    config: KVRayConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (2**16, before[1]))
    try:
        assert machine._locked_memory(config).verdict == "ok"
        monkeypatch.setattr(machine, "has_rdma", lambda: True)
        assert "memlock" in machine._locked_memory(config).fix
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


def test_a_secret_that_cannot_be_used_is_a_fault(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    config = load_config(overrides={"security.auth_token_file": str(token)}, environ={})
    for mode, verdict, fix in ((0o644, "fault", "chmod 600"), (0o600, "ok", "")):
        token.chmod(mode)
        (one,) = machine._secrets(config)
        assert (one.verdict, fix in one.fix) == (verdict, True)
    token.unlink()
    (one,) = machine._secrets(config)
    assert "cannot be read" in one.says
