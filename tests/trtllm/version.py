"""Has one version of TensorRT-LLM imported by a connector of its own."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

import kvray

STAND_INS = ("v1_2", "v1_3rc", "main_line", "feature_branch")
WITH_GROUPS = ("main_line", "feature_branch")
CONNECTOR = "kvray.connector"
EXPORTS = (
    "KvCacheConnectorScheduler",
    "KvCacheConnectorWorker",
    "RequestData",
    "SchedulerOutput",
    "KvCacheConnectorConfig",
)


def on(*names: str) -> pytest.MarkDecorator:
    """Return a mark for tests, and modules of them, that only these versions have something for."""
    return pytest.mark.parametrize("version", names, indirect=True, scope="module")


@dataclass(frozen=True)
class Version:
    """A stand-in, and kvray's connector as it is where that version is installed."""

    name: str
    stand_in: ModuleType
    connector: ModuleType
    utilities: ModuleType

    @property
    def worker_class(self) -> Any:
        return self.connector.KvRayWorker

    @property
    def scheduler_class(self) -> Any:
        return self.connector.KvRayScheduler

    @contextmanager
    def rank(self, rank: int) -> Iterator[None]:
        """Be that rank while halves are constructed."""
        vars(self.utilities)["mpi_rank"] = lambda: rank
        try:
            yield
        finally:
            vars(self.utilities)["mpi_rank"] = lambda: 0

    def module(self, name: str) -> Any:
        """Return a module of this connector."""
        return importlib.import_module(f"{CONNECTOR}.{name}")


@contextmanager
def installed(name: str) -> Iterator[Version]:
    """Have `import tensorrt_llm` find a stand-in, and a connector that was imported after it.

    The connector takes its base classes when it is imported. The one that other tests have is put
    aside, and comes back as it was.
    """
    stand_in = importlib.import_module(f"tests.trtllm.stand_ins.{name}")
    before = _take_out(CONNECTOR)
    modules = _packages(stand_in)
    sys.modules.update(modules)
    try:
        connector = importlib.import_module(CONNECTOR)
        yield Version(name, stand_in, connector, modules["tensorrt_llm._utils"])
    finally:
        _take_out(CONNECTOR)
        for path in modules:
            del sys.modules[path]
        sys.modules.update(before)
        if CONNECTOR in before:
            vars(kvray)["connector"] = before[CONNECTOR]


def _packages(stand_in: ModuleType) -> dict[str, ModuleType]:
    """Return the package, down to the module that a connector imports."""
    *parents, _ = parts = stand_in.MODULE.split(".")
    paths = [".".join(parts[: count + 1]) for count in range(len(parts))]
    modules = {path: ModuleType(path) for path in (*paths, "tensorrt_llm._utils")}
    for path in paths[: len(parents)]:
        modules[path].__path__ = []
    vars(modules["tensorrt_llm"])["__version__"] = stand_in.VERSION
    vars(modules["tensorrt_llm._utils"])["mpi_rank"] = lambda: 0
    vars(modules[stand_in.MODULE]).update({export: vars(stand_in)[export] for export in EXPORTS})
    return modules


def _take_out(package: str) -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == package or name.startswith(f"{package}.")]
    return {name: sys.modules.pop(name) for name in names}
