"""What `serve run` is given: settings, as a file or a command line has them."""

import sys

import pytest
from pydantic import ValidationError

from kvray.errors import ConfigError
from kvray.serve import Settings, app


def test_values_of_a_command_line_are_read_as_those_of_a_file() -> None:
    told = Settings.model_validate(
        {"model": "tiny", "num_replicas": "3", "engine_options": '{"num_blocks": 128}'}
    )
    assert told.num_replicas == 3
    assert told.engine_options == {"num_blocks": 128}
    assert told == Settings(model="tiny", num_replicas=3, engine_options={"num_blocks": 128})


@pytest.mark.parametrize("options", ["num_blocks=128", "[128]"])
def test_options_that_are_no_json_object_are_refused(options: str) -> None:
    with pytest.raises(ValidationError, match="engine_options"):
        Settings.model_validate({"engine_options": options})


def test_engines_are_of_a_number_or_scaled_by_serve() -> None:
    scaled = '{"min_replicas": 1, "max_replicas": 3}'
    told = Settings.model_validate({"autoscaling_config": scaled})
    assert told.autoscaling_config == {"min_replicas": 1, "max_replicas": 3}
    with pytest.raises(ValidationError, match="exclude each other"):
        Settings.model_validate({"autoscaling_config": scaled, "num_replicas": 2})


def test_an_ingress_that_is_replaced_gives_its_answers_to_the_end() -> None:
    pytest.importorskip("ray.serve")
    ingress = app({"model": "tiny", "request_timeout_s": 450})._bound_deployment
    assert ingress._deployment_config.graceful_shutdown_timeout_s == 450


def test_a_missing_package_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray.serve")
    monkeypatch.delitem(sys.modules, "kvray.serve.ingress", raising=False)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(ConfigError, match=r"fastapi: run pip install 'kvray\[serve\]'"):
        app({"model": "tiny"})
