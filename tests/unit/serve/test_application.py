"""The application: its settings, what the endpoint and the router take and refuse, and texts."""

import sys

import numpy as np
import pytest

pytest.importorskip("ray.serve")
pytest.importorskip("openai")

from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import ValidationError

from kvray.errors import ConfigError
from kvray.serve import Settings, app
from kvray.serve.protocol import (
    ChatRequest,
    ChatWriter,
    CompletionRequest,
    Writer,
    describe_model,
    usage,
)
from kvray.serve.router import KvRayRouter, _prompt_of
from kvray.serve.text import Answer, load_prompts


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
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(ConfigError, match=r"fastapi: run pip install 'kvray\[serve\]'"):
        app({"model": "tiny"})


def test_a_defect_is_told_in_openais_form():
    from fastapi.testclient import TestClient

    from kvray.serve.ingress import app

    # Outside a replica of Serve a path has nobody who could answer it.
    answer = TestClient(app, raise_server_exceptions=False).get("/v1/models")
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert error["type"] == "server_error"
    assert "RayServeException" in error["message"]


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
    KvRayRouter.initialize_state(object.__new__(KvRayRouter), pool_block=8)  # type: ignore[call-arg]
    assert "no argument pool_block; correct request_router_kwargs" in caplog.text


TEXT = "naïve café \N{PARTY POPPER} 日本語, end"


PROMPTS = load_prompts(Settings(model="tiny"))


def pieces(text: str, *stop: str) -> list[str]:
    """Return the answer's pieces when its tokens, which are bytes, come one by one."""
    answer = Answer(PROMPTS.decode, PROMPTS.encode("prompt"), stop)
    return [*(answer.add([token]) for token in PROMPTS.encode(text)), answer.finish()]


def test_pieces_are_the_text_and_none_has_half_a_character():
    found = pieces(TEXT)
    assert "".join(found) == TEXT
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in found)


def test_bytes_that_are_no_text_are_replaced_in_pieces_as_in_the_whole():
    tokens = [3 + byte for byte in b"a\xff\xfeb\xc3"]
    for parts in ([tokens], [[token] for token in tokens]):
        answer = Answer(PROMPTS.decode, [])
        assert "".join(map(answer.add, parts)) + answer.finish() == "a\ufffd\ufffdb\ufffd"


@pytest.mark.parametrize("stop", ["café", "naïve", "end", ", e"])
def test_a_stop_text_ends_the_answer_and_no_piece_shows_its_beginning(stop):
    assert "".join(pieces(TEXT, "nothing of it", stop)) == TEXT[: TEXT.index(stop)]


def test_what_may_begin_a_stop_text_is_shown_at_the_end():
    assert "".join(pieces("one, tw", "two")) == "one, tw"


def test_tokens_after_the_stop_are_not_counted():
    answer = Answer(PROMPTS.decode, [], ["b"])
    assert answer.add(PROMPTS.encode("abcdef")) == "a"
    assert (answer.is_stopped, answer.num_tokens) == (True, 2)


def test_a_model_without_a_template_gets_a_line_a_message():
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    told = PROMPTS.decode(PROMPTS.encode_chat(chat))
    assert told == "system: Be brief.\nuser: Hi\nassistant:"


def test_arguments_that_change_nothing_are_taken_and_others_refused():
    asked = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    ChatRequest(**asked, temperature=0, n=1, seed=3, user="me", top_p=0.9)
    for options, said in (
        ({"temperature": 0.7}, "temperature=0.7 is not supported"),
        ({"n": 2}, "n=2 is not supported"),
        ({"tools": [{}]}, "tools="),
        ({"max_length": 3}, "no argument 'max_length'"),
    ):
        with pytest.raises(ValidationError, match=said):
            ChatRequest(**asked, **options)


def test_messages_may_have_text_in_parts_and_developers_are_the_system():
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    asked = ChatRequest(model="m", messages=[{"role": "developer", "content": parts}])
    assert asked.messages[0].plain() == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("prompt", ["text", [5, 6]])
def test_a_list_of_one_prompt_is_that_prompt_and_several_are_refused(prompt):
    assert CompletionRequest(model="m", prompt=prompt).prompt == prompt
    assert CompletionRequest(model="m", prompt=[prompt]).prompt == prompt
    with pytest.raises(ValidationError, match="one prompt a request"):
        CompletionRequest(model="m", prompt=[prompt, prompt])


def test_usage_does_not_say_what_is_not_known():
    whole = Writer("m").whole("text", "stop", usage(3, 4, None))
    assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    chunk = ChatWriter("m").usage_chunk(usage(3, 4, 2))
    assert (chunk["choices"], chunk["usage"]["prompt_tokens_details"]) == ([], {"cached_tokens": 2})


def test_answers_are_of_the_types_of_openais_package():
    used = usage(3, 4, 2, {"pool": 2, "tier": 0})
    writer, chat = Writer("m"), ChatWriter("m")
    Model.model_validate(describe_model("m", 1), strict=True)
    Completion.model_validate(writer.whole("text", "stop", used), strict=True)
    ChatCompletion.model_validate(chat.whole("text", "stop", used), strict=True)
    chunks = [*chat.opening(), chat.chunk("text"), chat.chunk("", "stop"), chat.usage_chunk(used)]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    deltas = [one["choices"][0]["delta"] for one in chunks[:3]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "text"}, {}]
    assert writer.chunk("text")["choices"] == [{"index": 0, "text": "text", "finish_reason": None}]
