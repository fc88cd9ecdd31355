"""Has one version of TensorRT-LLM imported by a connector of its own.

Classes, records and arguments are made of the version's table in `facts/`, so each stands there
alone. What the manager between executor and connector does otherwise than the reference engine's
stands here.
"""

from __future__ import annotations

import copy
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import field, make_dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ConfigDict, create_model

import kvray
from kvray.reference.connector_manager import KvCacheConnectorManager
from kvray.reference.request import LlmRequest, LlmRequestState
from tests.trtllm.memory import BLOCK, NO_PAGE

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings it along
    import tomli as tomllib

FACTS = Path(__file__).parent / "facts"
TABLES = {path.stem: tomllib.loads(path.read_text()) for path in FACTS.glob("*.toml")}
NOWHERE = TABLES.pop("nowhere")
NAMES = ("v1_2", "v1_3rc", "main_line", "feature_branch")
WITH_GROUPS = ("main_line", "feature_branch")
CONNECTOR = "kvray.connector"

_LISTS = (
    *("new_requests", "cached_requests", "block_hashes", "new_block_ids_by_layer_group"),
    *("new_tokens", "new_block_ids"),
)
_DEFAULTS = {"expansion": 1, "dtype": torch.uint8, "replicated_regions": ()}
_OWN = {"request_id", "prompt_len", "get_tokens", "try_get_encoder_output_len"}
"""What a request of these tests has by itself."""


def on(*names: str) -> pytest.MarkDecorator:
    """Return a mark for tests, and modules of them, that only these versions have something for."""
    return pytest.mark.parametrize("version", names, indirect=True, scope="module")


Policy = Enum("Policy", "GUARANTEED_NO_EVICT")


class Version:
    """One version: what `tensorrt_llm` has there, and kvray's connector as it is beside it."""

    connector: ModuleType
    utilities: ModuleType

    def __init__(self, name: str) -> None:
        self.name = name
        self.table = table = TABLES[name]
        self.has_groups = "KvCacheLayout" in table["records"]
        self.resolves_late = "cancel_load" in table["scheduler"]["default"]
        self.has_hashes = "block_hashes" in table["records"]["RequestData"]
        """Whether reports have hashes of blocks, and salts are texts."""
        self.salt_field = "cache_salt" if self.has_hashes else "cache_salt_id"
        self.bound = tuple(table["request"]["bound"])
        """What bindings show of a request, of all that kvray reads."""
        self.shown = (*self.bound, *table["request"]["python"])
        """What the original shows: Python's subclass has more."""
        self.retains = "priorities" in table["records"]["RequestData"]
        """Whether a request's retention config reaches the connector, with one pool."""
        fields = {*self.shown} - _OWN | ({"kv_cache_retention_config"} if self.retains else set())
        self.request_fields = dict.fromkeys(fields) | {"is_generation_only_request": False}
        self.exports = {one: _record(one, fields) for one, fields in table["records"].items()}
        self.exports["KvCacheConnectorWorker"] = _half(table["worker"])
        self.exports["KvCacheConnectorScheduler"] = _half(table["scheduler"])
        setting: Any = (Any, None) if self.has_groups else (str, ...)
        self.exports["KvCacheConnectorConfig"] = create_model(
            "KvCacheConnectorConfig",
            __config__=ConfigDict(extra="forbid"),
            **dict.fromkeys(table["records"]["KvCacheConnectorConfig"], setting),
        )
        vars(self).update(self.exports)

    @property
    def worker_class(self) -> Any:
        return self.connector.KvRayWorker

    @property
    def scheduler_class(self) -> Any:
        return self.connector.KvRayScheduler

    def construct(
        self, ranks: Sequence[int] = (0,), *, num_ranks: int = 1, **changes: Any
    ) -> tuple[list[Any], Any]:
        """Return a worker for each of `ranks`, and the scheduler of the first.

        As an executor does it, both halves of a rank at once, each in a thread of its own.
        """
        workers, scheduler = [], None
        cache = changes.pop("cache", {})
        for rank in ranks:
            args = self.llm_args(num_ranks=num_ranks, rank=rank, cache=cache, **changes)
            with self._rank(rank), ThreadPoolExecutor(2) as threads:
                worker = threads.submit(self.worker_class, args)
                if scheduler is None:
                    scheduler = threads.submit(self.scheduler_class, args)
            workers.append(worker.result())
        return workers, scheduler.result()

    @contextmanager
    def halves(self, **changes: Any) -> Iterator[tuple[Any, Any]]:
        """Construct a rank's worker and scheduler, and let them go."""
        (worker,), scheduler = self.construct(**changes)
        try:
            yield worker, scheduler
        finally:
            scheduler.shutdown()
            worker.shutdown()

    def start(self, **changes: Any) -> None:
        with self.halves(**changes):
            return

    @contextmanager
    def _rank(self, rank: int) -> Iterator[None]:
        vars(self.utilities)["mpi_rank"] = lambda: rank
        try:
            yield
        finally:
            vars(self.utilities)["mpi_rank"] = lambda: 0

    def llm_args(self, *, num_ranks: int, rank: int, cache: dict[str, Any], **changes: Any) -> Any:
        """Return what both halves of a connector are constructed with, on that rank."""
        mapping = SimpleNamespace(rank=rank, tp_size=num_ranks)
        values = {
            "model": "not-on-this-machine",
            "dtype": "auto",
            "load_format": "AUTO",
            "force_dynamic_quantization": False,
            "gpus_per_node": 8,
            "tensor_parallel_size": num_ranks,
            "pipeline_parallel_size": 1,
            "context_parallel_size": 1,
            "enable_attention_dp": False,
            "max_beam_width": 1,
            "disable_overlap_scheduler": False,
            "attn_backend": "TRTLLM",
            "scheduler_config": SimpleNamespace(
                capacity_scheduler_policy=Policy.GUARANTEED_NO_EVICT
            ),
            "parallel_config": SimpleNamespace(to_mapping=lambda: mapping),
        }
        cache_values = {
            "dtype": "auto",
            "enable_block_reuse": True,
            "enable_partial_reuse": False,
            "enable_swa_scratch_reuse": False,
            "tokens_per_block": BLOCK,
            "use_kv_cache_manager_v2": "auto" if self.has_groups else False,
        }
        reads = self.table["reads"]
        args = {name: values.get(name) for name in reads["llm_args"]}
        known = {name: cache_values.get(name) for name in reads["kv_cache_config"]}
        args["kv_cache_config"] = SimpleNamespace(**known | cache)
        return SimpleNamespace(**args | changes)

    def manager(self, worker: Any, scheduler: Any, *, owner: int | None, is_flat: bool) -> Any:
        """Return what is between executor and connector; `is_flat`: the first cache manager is."""
        if owner is not None:  # `main` has attention DP with the second cache manager only
            assert self.resolves_late or not is_flat, "owners need layer groups"
            halves = (*worker.workers, scheduler)
            assert all(type(one).supports_attention_dp is True for one in halves)
        if self.has_groups:
            # Both grouped forms or neither: engines with several groups ask for it at the start.
            for name in ("update_state_after_alloc", "request_finished"):
                assert f"{name}_by_layer_group" in vars(type(scheduler))
        if "wait_for_initialization" in self.table["scheduler"]["default"]:
            scheduler.wait_for_initialization()
        manager = FlatManager if is_flat else GroupManager
        return manager(self, worker, Asked(self, scheduler, is_flat=is_flat), owner)


@contextmanager
def installed(name: str) -> Iterator[Version]:
    """Have `import tensorrt_llm` find a stand-in, and a connector that was imported after it.

    The connector takes its base classes when it is imported. The one that other tests have is put
    aside, and comes back as it was.
    """
    version = Version(name)
    before = _take_out(CONNECTOR)
    modules = _packages(version)
    sys.modules.update(modules)
    try:
        version.connector = importlib.import_module(CONNECTOR)
        version.utilities = modules["tensorrt_llm._utils"]
        yield version
    finally:
        _take_out(CONNECTOR)
        for path in modules:
            del sys.modules[path]
        sys.modules.update(before)
        if CONNECTOR in before:
            vars(kvray)["connector"] = before[CONNECTOR]


def _packages(version: Version) -> dict[str, ModuleType]:
    """Return the package, down to the module that a connector imports."""
    *parents, _ = parts = version.table["module"].split(".")
    paths = [".".join(parts[: count + 1]) for count in range(len(parts))]
    modules = {path: ModuleType(path) for path in (*paths, "tensorrt_llm._utils")}
    for path in paths[: len(parents)]:
        modules[path].__path__ = []
    vars(modules["tensorrt_llm"])["__version__"] = version.table["version"]
    vars(modules["tensorrt_llm._utils"])["mpi_rank"] = lambda: 0
    vars(modules[paths[-1]]).update(version.exports)
    return modules


def _take_out(package: str) -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == package or name.startswith(f"{package}.")]
    return {name: sys.modules.pop(name) for name in names}


def _record(name: str, names: list[str]) -> type:
    """Return a dataclass; what comes behind the fields that kvray reads may be left out."""
    fields: list[Any] = []
    for one in names:
        default = field(default_factory=list) if one in _LISTS else _DEFAULTS.get(one)
        fields.append((one, Any, default))
    is_layout = name.startswith("KvCache")
    space = {"as_tensor": _missing} if name == "KvCacheRegion" else {}
    return make_dataclass(name, fields, frozen=is_layout, namespace=space)


def _half(table: dict[str, Any]) -> type:
    """Return an abstract class whose methods with a body do what those of every version do."""
    kept = table.get("kept_metadata", "")

    def __init__(self: Any, llm_args: Any) -> None:
        self._llm_args = llm_args
        if kept:
            setattr(self, kept, None)

    space: dict[str, Any] = dict.fromkeys(table["attributes"], False)
    space |= {name: abstractmethod(_nothing()) for name in table["abstract"]}
    space |= {name: _nothing() for name in table["default"]} | {"__init__": __init__}
    if kept:
        space["bind_connector_meta"] = lambda self, metadata: setattr(self, kept, metadata)
        space["get_connector_meta"] = lambda self: getattr(self, kept)
        space["_clear_connector_meta"] = lambda self: setattr(self, kept, None)
    for name in table["default"]:
        if name.endswith(("_by_layer_group", "_layout")):
            space[name] = _missing
    return type("KvCacheConnectorHalf", (ABC,), space)


def _nothing() -> Callable[..., None]:
    return lambda *_: None


def _missing(*_: Any) -> None:
    raise NotImplementedError("kvray does this itself")


def copy_of(request: Any, names: Sequence[str]) -> SimpleNamespace:
    """Return a request as C++ hands it to Python: another object at every call.

    Source: the first manager's trampoline takes `LlmRequest const&`, which nanobind casts to a copy
    of the base class. It has what the bindings bind; what Python has set on the original it has
    not.
    """
    return SimpleNamespace(**{name: getattr(request, name) for name in names})


class Original:
    """The request itself, whose other attributes are none of the connector's business."""

    def __init__(self, request: Any, names: tuple[str, ...]) -> None:
        self._request = request
        self._names = names

    def __getattr__(self, name: str) -> Any:
        if name not in self._names:
            raise AttributeError(name)
        return getattr(self._request, name)


class Asked:
    """The scheduler as this version's engine calls it: with one list of blocks, or one a group."""

    def __init__(self, version: Version, scheduler: Any, *, is_flat: bool) -> None:
        self._version = version
        self._scheduler = scheduler
        self._is_flat = is_flat
        self.build_connector_meta = scheduler.build_connector_meta

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int, bool]:
        """Ask with the original, or from C++ with a copy."""
        asked = self._original(request)
        if self._is_flat:
            if request.is_generation_only_request:
                raise RuntimeError("no connector for requests that only generate")
            asked = copy_of(request, self._version.bound)
        return self._scheduler.get_num_new_matched_tokens(asked, num_computed)

    def update_state_after_alloc(self, request: Any, groups: list[list[int]]) -> None:
        self._tell("update_state_after_alloc", request, groups)

    def request_finished(self, request: Any, groups: list[list[int]]) -> bool:
        return self._tell("request_finished", request, groups)

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        self._scheduler.cancel_load(self._original(request), start, end)

    def request_reset(self, request: Any) -> None:
        self._scheduler.request_reset(self._original(request))

    def _tell(self, name: str, request: Any, groups: list[list[int]]) -> Any:
        if self._is_flat:
            return getattr(self._scheduler, name)(self._original(request), groups[0])
        grouped = getattr(self._scheduler, f"{name}_by_layer_group")
        return grouped(self._original(request), groups)

    def _original(self, request: Any) -> Any:
        original = Original(request, self._version.shown)
        return vars(request).setdefault("original", original)


class FlatManager(KvCacheConnectorManager):
    """The reference engine's manager, with this version's records and habits, for one pool."""

    def __init__(
        self, version: Version, worker: Any, scheduler: Any, owner: int | None = None
    ) -> None:
        super().__init__(worker, scheduler, attention_dp_rank=owner)
        self.version = version
        self.data_class = version.exports["RequestData"]
        self.output_class = version.exports["SchedulerOutput"]

    @property
    def is_owner(self) -> bool:
        return self._attention_dp_rank is not None

    def commit(self, request: LlmRequest, num_tokens: int) -> None:
        """Note it as the base class does, but on a copy, which nobody sees again."""
        super().commit(copy.copy(request), num_tokens)

    def forget(self, request: LlmRequest) -> None:
        """Keep what is known of ended requests for ever, as all do who do not own them."""
        if self.is_owner:
            super().forget(request)

    def _report(self, request: Any, groups: list[Any]) -> Any:
        request.was_reported = True
        data = super()._report(request, groups[0])
        if self.version.name == "v1_2" and request.state is not LlmRequestState.CONTEXT_INIT:
            data.num_scheduled_tokens = 1  # drafts are not counted
        if (config := getattr(request, "kv_cache_retention_config", None)) is not None:
            data.priorities = [config.priority] * len(data.new_block_ids)
        if self.version.has_hashes:
            if NO_PAGE in groups[0]:  # `commitAndGetBlockHashesForRequest`, from #14806 on
                raise RuntimeError("no hashes behind front blocks that a window has let go")
            ends = range(BLOCK - 1, len(request.get_tokens(0)), BLOCK)
            data.block_hashes = [hash(request.digest(end)) for end in ends]
        return data


class GroupManager(FlatManager):
    """The manager for layer groups: it asks and commits apart, so that less may be taken."""

    commit = KvCacheConnectorManager.commit

    def query(self, request: LlmRequest, num_computed: int) -> int:
        """Ask without any effect on what is reported."""
        count, is_async = self.scheduler.get_num_new_matched_tokens(request, num_computed)
        assert not is_async, "kvray loads before the pass"
        return count

    def cancel_load(self, request: LlmRequest, start: int, end: int) -> None:
        if self.version.resolves_late and end > start:
            self.scheduler.cancel_load(request, start, end)

    def replay(self, request: LlmRequest) -> None:
        """Report a request whose blocks were taken away as a new one."""
        KvCacheConnectorManager.forget(self, request)
        self._external_loads.pop(request.request_id, None)
        if self.version.resolves_late:
            self.scheduler.request_reset(request)

    def handle_metadata(self) -> None:
        super().handle_metadata()
        super().handle_metadata()  # once for the batch, once before the loads

    def _report(self, request: Any, groups: list[list[int]]) -> Any:
        request.was_reported = True
        data = KvCacheConnectorManager._report(self, request, groups)
        data.new_block_ids_by_layer_group = fresh = data.new_block_ids
        data.new_block_ids = fresh[0] if len(fresh) == 1 else []
        return data

    def _take_new(self, request: LlmRequest, *lists: list[Any]) -> list[list[Any]]:
        tokens, groups = lists
        new_tokens, *new_pages = super()._take_new(request, tokens, *groups)
        return [new_tokens, new_pages]
