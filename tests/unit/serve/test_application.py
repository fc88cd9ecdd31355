"""The application: its settings, what the router takes and refuses, and `kvray.serve.llm`."""

import importlib
import json
import sys
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest

pytest.importorskip("ray.serve")
pytest.importorskip("openai")

from pydantic import ValidationError
from ray import serve
from ray.serve._private.common import DeploymentID

from kvray.errors import ConfigError
from kvray.serve import Settings, app
from kvray.serve.routed import Routed
from kvray.serve.router import KvRayRouter, _prompt_of
from kvray.vllm import CONNECTOR

SCALED = {"min_replicas": 1, "max_replicas": 3}


@pytest.mark.parametrize("engines", [{"num_replicas": 3}, {"autoscaling_config": SCALED}])
def test_values_of_a_command_line_are_read_as_those_of_a_file(engines):
    lists = {"command": ["mine", "{port}"], "paths": ["/v1", "/score"]}
    read = {"engine_options": {"num_blocks": 128}, **lists, **engines}
    told = {name: json.dumps(value) for name, value in read.items()}
    assert Settings.model_validate(told).model_dump(include={*read}) == read


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"engine_options": "num_blocks=128"}, "engine_options"),
        ({"engine_options": "[128]"}, "engine_options"),
        ({"autoscaling_config": SCALED, "num_replicas": 2}, "exclude each other"),
        ({"engine": "vllm", "pool_events": True}, "vLLM publishes by itself"),
    ],
)
def test_settings_that_are_wrong_or_contradict_each_other_are_refused(settings, words):
    with pytest.raises(ValidationError, match=words):
        Settings.model_validate(settings)


def test_an_ingress_that_is_replaced_gives_its_answers_to_the_end():
    ingress = app({"model": "tiny", "request_timeout_s": 450})._bound_deployment
    assert ingress._deployment_config.graceful_shutdown_timeout_s == 450


def test_a_missing_package_is_a_sentence(monkeypatch):
    monkeypatch.delitem(sys.modules, "kvray.serve.ingress", raising=False)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    with pytest.raises(ConfigError, match=r"starlette\.app.* run `pip install 'kvray\[serve\]'`"):
        app({"model": "tiny"})


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("KVRAY_CONFIG", raising=False)
    monkeypatch.setattr("kvray.serve.router.MetricsThread", lambda *_: None)
    made = object.__new__(KvRayRouter)
    made._deployment_id = DeploymentID(name="Engine", app_name="kvray")
    made.initialize_state()
    monkeypatch.setattr(made._loads, "start", lambda: None)
    return made


@pytest.mark.parametrize(
    ("args", "kwargs", "tokens"),
    [
        ([[1, 2, 3], 16], {}, [1, 2, 3]),
        ([], {"kvray_tokens": [4, 5]}, [4, 5]),
        ([[1]], {"kvray_tokens": [4, 5], "kvray_salt": "a/b", "kvray_lora": "/l"}, [4, 5]),
        ([{"messages": []}], {"kvray_tokens": np.array([7])}, [7]),
    ],
)
def test_token_ids_are_found_and_salt_and_adapter_as_parts_of_their_keys(args, kwargs, tokens):
    found, marks = _prompt_of(args, kwargs)
    assert list(found) == tokens
    assert marks == {"salt": kwargs.get("kvray_salt"), "lora": kwargs.get("kvray_lora")}


@pytest.mark.anyio
async def test_a_defect_as_a_router_decides_costs_no_request(router, monkeypatch):
    monkeypatch.setattr(router._surveys, "survey", AsyncMock(side_effect=KeyError))
    replica, asked = Mock(), Mock(args=[[1, 2]], kwargs={})
    assert await router.choose_replicas([replica], asked) == [[replica]]


@pytest.mark.anyio
@pytest.mark.parametrize("is_told", [True, False])
async def test_the_first_token_of_a_whole_answer_comes_when_it_is_due(router, monkeypatch, is_told):
    monkeypatch.setattr(router, "_decisions", decisions := Mock())
    decisions.order.return_value = None
    asked = Mock(args=[], kwargs={"kvray_routed": Routed(is_told=is_told)})
    await router.choose_replicas([Mock()], asked)
    assert decisions.begin.call_args.kwargs["is_told"] is is_told


@pytest.mark.parametrize("args", [[], ["text"], [["a", "b"]], [[]], [None], [[True]]])
def test_what_is_no_prompt_is_passed_over(args):
    assert _prompt_of(args, {}) == (None, {})


def test_an_argument_that_it_does_not_have_is_named(caplog, router):
    router.initialize_state(pool_block=8)
    assert "no argument pool_block; correct request_router_kwargs" in caplog.text


def test_options_are_those_of_a_file_and_of_the_settings(tmp_path):
    path = tmp_path / "more.yaml"
    path.write_text("tokenizer: /t\nnum_blocks: 7\n")
    given = Settings(options_file=path, engine_options={"num_blocks": 9})
    assert given.options() == {"tokenizer": "/t", "num_blocks": 9}
    path.write_text("- nothing")
    with pytest.raises(ConfigError, match="write `name: value`"):
        given.options()
    path.unlink()
    with pytest.raises(ConfigError, match="options_file cannot be read"):
        given.options()


def test_serve_pickles_the_routers_module_by_value_and_what_an_ingress_tells_it_by_is_elsewhere():
    assert Routed.__module__ != KvRayRouter.__module__  # else `isinstance` fails in the router


class Backend:
    """As that of ray.serve.llm, whose factory makes some of their classes."""

    classes: ClassVar[dict[str, str]] = {}
    is_registered, register_backend = classes.__contains__, classes.__setitem__

    def __init__(self, config: dict[str, Any]) -> None:
        self.kv_transfer_config = config


OWN = {"kvray_replica": "mine", "kvray_config": "/etc/kvray.yaml"}


@pytest.mark.parametrize(
    ("written", "extra"),
    [
        ({"kv_connector": "KvRayConnector"}, {"kvray_replica": "r7k2"}),
        ({**CONNECTOR, "kv_connector_extra_config": OWN}, OWN),
    ],
)
def test_a_connectors_name_is_all_that_a_user_writes_and_what_he_writes_stays(
    monkeypatch, written, extra
):
    theirs = SimpleNamespace(DefaultConnectorBackend=Backend, KVConnectorBackendFactory=Backend)
    for name in ("base", "factory"):
        transfer = f"ray.llm._internal.serve.engines.vllm.kv_transfer.{name}"
        monkeypatch.setitem(sys.modules, transfer, theirs)
    monkeypatch.setitem(sys.modules, "kvray.serve.llm", None)  # and as it was after the test
    del sys.modules["kvray.serve.llm"]
    importlib.import_module("kvray.serve.llm")
    replica = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r7k2"))
    monkeypatch.setattr(serve, "get_replica_context", lambda: replica)
    module, name = Backend.classes["KvRayConnector"].split(":")
    config = dict(written)
    getattr(importlib.import_module(module), name)(config).setup()
    assert config == {**CONNECTOR, "kv_connector_extra_config": extra}
