"""The application: its settings, and what the router takes and refuses."""

import sys

import numpy as np
import pytest

pytest.importorskip("ray.serve")
pytest.importorskip("openai")

from pydantic import ValidationError
from ray.serve._private.common import DeploymentID

from kvray.errors import ConfigError
from kvray.serve import Settings, app
from kvray.serve.routed import Routed
from kvray.serve.router import KvRayRouter, _prompt_of


def test_values_of_a_command_line_are_read_as_those_of_a_file():
    told = {"model": "tiny", "num_replicas": "3", "engine_options": '{"num_blocks": 128}'}
    read = Settings(model="tiny", num_replicas=3, engine_options={"num_blocks": 128})
    assert Settings.model_validate(told) == read


@pytest.mark.parametrize("options", ["num_blocks=128", "[128]"])
def test_options_that_are_no_json_object_are_refused(options):
    with pytest.raises(ValidationError, match="engine_options"):
        Settings.model_validate({"engine_options": options})


def test_engines_are_of_a_number_or_scaled_by_serve():
    scaled = '{"min_replicas": 1, "max_replicas": 3}'
    told = Settings.model_validate({"autoscaling_config": scaled})
    assert told.autoscaling_config == {"min_replicas": 1, "max_replicas": 3}
    with pytest.raises(ValidationError, match="exclude each other"):
        Settings.model_validate({"autoscaling_config": scaled, "num_replicas": 2})


def test_an_ingress_that_is_replaced_gives_its_answers_to_the_end():
    ingress = app({"model": "tiny", "request_timeout_s": 450})._bound_deployment
    assert ingress._deployment_config.graceful_shutdown_timeout_s == 450


def test_a_missing_package_is_a_sentence(monkeypatch):
    monkeypatch.delitem(sys.modules, "kvray.serve.ingress", raising=False)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    with pytest.raises(ConfigError, match=r"starlette\.app.* run `pip install 'kvray\[serve\]'`"):
        app({"model": "tiny"})


@pytest.mark.parametrize(
    ("args", "kwargs", "tokens"),
    [
        ([[1, 2, 3], 16], {}, [1, 2, 3]),
        ([], {"kvray_tokens": [4, 5]}, [4, 5]),
        ([[1]], {"kvray_tokens": [4, 5]}, [4, 5]),
        ([{"messages": []}], {"kvray_tokens": np.array([7])}, [7]),
    ],
)
def test_token_ids_are_found(args, kwargs, tokens):
    found, marks = _prompt_of(args, kwargs)
    assert list(found) == tokens
    assert marks == {"salt": None, "lora": None}


@pytest.mark.parametrize("args", [[], ["text"], [["a", "b"]], [[]], [None], [[True]]])
def test_what_is_no_prompt_is_passed_over(args):
    assert _prompt_of(args, {}) == (None, {})


def test_salt_and_adapter_are_parts_of_the_keys():
    kwargs = {"kvray_tokens": [1], "kvray_salt": "a/b", "kvray_lora": "/l"}
    assert _prompt_of([], kwargs)[1] == {"salt": "a/b", "lora": "/l"}


def test_an_argument_that_it_does_not_have_is_named(caplog, monkeypatch):
    monkeypatch.delenv("KVRAY_CONFIG", raising=False)
    monkeypatch.setattr("kvray.serve.router.MetricsThread", lambda *_: None)
    router = object.__new__(KvRayRouter)
    router._deployment_id = DeploymentID(name="Engine", app_name="kvray")
    router.initialize_state(pool_block=8)  # type: ignore[call-arg]
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


def test_lists_of_a_command_line_are_json():
    told = Settings.model_validate({"command": '["mine", "{port}"]', "paths": '["/v1", "/score"]'})
    assert (told.command, told.paths) == (["mine", "{port}"], ["/v1", "/score"])


def test_serve_pickles_the_routers_module_by_value_and_what_an_ingress_tells_it_by_is_elsewhere():
    assert Routed.__module__ != KvRayRouter.__module__  # else `isinstance` fails in the router
