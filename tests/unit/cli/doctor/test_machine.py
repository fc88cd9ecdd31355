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
    assert found["connector"].says.endswith("brings no Ray")
    assert all(one.fix for one in found.values() if one.verdict == "hint")


def test_few_open_files_are_a_hint(files_limit: None, config: KVRayConfig) -> None:
    one = machine._open_files()
    assert one.verdict == "hint"
    assert "ulimit -n" in one.fix


def test_nixl_is_not_tried_where_it_is_not_configured() -> None:
    config = load_config(overrides={"staging.transports": ["object_ref"]}, environ={})
    assert machine._nixl(config).verdict == "skipped"


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
