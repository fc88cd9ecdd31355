"""Without TensorRT-LLM the base classes are our own; with a broken one nothing is hidden."""

import sys
from pathlib import Path

import pytest

from kvray.connector import base


def test_worker_keeps_the_metadata_of_its_pass() -> None:
    worker = base.KvCacheConnectorWorker("args")
    assert worker._llm_args == "args"
    assert worker.get_connector_meta() is None
    worker.bind_connector_meta({"loads": []})
    assert worker.get_connector_meta() == {"loads": []}
    assert worker.register_forward_pass_callable() is None


def test_absent_package_is_none() -> None:
    assert base.find_upstream(["no_such_package.inner.connector"]) is None


def test_second_path_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "fake_trtllm"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "old.py").write_text("NAME = 'old'\n")
    (package / "broken.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = base.find_upstream(["fake_trtllm.connectors.new", "fake_trtllm.old"])
    assert found is not None
    assert found.NAME == "old"
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        base.find_upstream(["fake_trtllm.broken"])
    for name in [name for name in sys.modules if name.startswith("fake_trtllm")]:
        del sys.modules[name]
