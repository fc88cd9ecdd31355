"""The reference engine's own server: answers in OpenAI's types, texts in pieces, refusals."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

from fastapi.testclient import TestClient
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from kvray.lab.openai_server import Server, Text
from kvray.reference.engine import ReferenceEngine
from kvray.reference.tokenizer import ByteTokenizer, CheckpointTokenizer
from kvray.serve.render import load_prompts
from kvray.serve.settings import Settings
from tests.waiting import HANG_S

TEXT = "naïve café \N{PARTY POPPER} 日本語, end"
CHAT = [{"role": "user", "content": "Hi"}]
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    prompts = load_prompts(Settings(model="tiny"), engine="reference")
    with ReferenceEngine("tiny", num_threads=1) as engine:
        app = Server(engine, prompts, "tiny").application()
        with TestClient(app, raise_server_exceptions=False) as made:
            yield made


def chat(client: TestClient, **asked: Any) -> Any:
    body = {"model": "tiny", "messages": CHAT, "max_tokens": 6, **asked}
    return client.post("/v1/chat/completions", json=body)


def complete(client: TestClient, **asked: Any) -> Any:
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 6, **asked}
    return client.post("/v1/completions", json=body)


def chunks_of(answer: Any) -> list[dict[str, Any]]:
    *lines, last = [line for line in answer.text.split("\n\n") if line]
    assert last == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.anyio
async def test_a_client_that_goes_ends_a_whole_answer_too(monkeypatch):
    prompts = load_prompts(Settings(model="tiny"), engine="reference")
    with ReferenceEngine("tiny", num_threads=1) as engine:
        app, calls, submit = Server(engine, prompts, "tiny").application(), [], engine.submit

        def noted(*args: Any, **options: Any) -> Any:
            calls.append(submit(*args, **options))
            return calls[-1]

        monkeypatch.setattr(engine, "submit", noted)
        body = json.dumps({"model": "tiny", "prompt": [5], "max_tokens": 3000}).encode()
        said = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
        headers = [(b"content-type", b"application/json")]
        receive, send = AsyncMock(side_effect=said), AsyncMock()
        await app({**scope, "headers": headers, "http_version": "1.1"}, receive, send)
        assert send.await_args_list[0].args[0]["status"] == 499
        (call,) = calls
        assert call.result(HANG_S).finish_reason == "cancelled"


def test_answers_are_of_the_types_of_openais_package(client):
    Model.model_validate(client.get("/v1/models").json()["data"][0], strict=True)
    Completion.model_validate(complete(client).json(), strict=True)
    whole = ChatCompletion.model_validate(chat(client, n=2).json(), strict=True)
    first, second = whole.choices
    assert (first.index, second.index) == (0, 1)
    assert first.message.content == second.message.content, "it is greedy"
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len("user: Hi\nassistant:")
    assert whole.usage.completion_tokens == 12
    chunks = chunks_of(chat(client, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    deltas = [one["choices"][0]["delta"] for one in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert "".join(one.get("content", "") for one in deltas) == first.message.content
    assert chunks[-1]["usage"]["completion_tokens"] == 6


def test_several_prompts_have_several_answers_whole_and_in_pieces(client):
    asked = {"prompt": ["one", [5, 6, 7]], "n": 2}
    whole = complete(client, **asked).json()
    texts = [one["text"] for one in whole["choices"]]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert whole["usage"]["prompt_tokens"] == 6
    pieces = ["", "", "", ""]
    for chunk in chunks_of(complete(client, **asked, stream=True)):
        for choice in chunk["choices"]:
            pieces[choice["index"]] += choice["text"]
    assert pieces == texts


@pytest.mark.parametrize(
    ("asked", "status", "words"),
    [
        ({"temperature": 0.7}, 400, "temperature=0.7 is not supported"),
        ({"tools": [{}]}, 400, "tools="),
        ({"max_length": 3}, 400, "no argument 'max_length'"),
        ({"model": "gpt-5"}, 404, "does not exist"),
        ({"max_tokens": 100_000}, 400, "do not fit"),
        ({"max_tokens": 100_000, "stream": True}, 400, "do not fit"),
        ({"messages": []}, 400, "at least 1 item"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "surrogate"),
        ({"cache_salt": ""}, 400, "at least 1 character"),
    ],
)
def test_what_it_does_not_do_is_said_in_a_sentence(client, asked, status, words):
    body = json.dumps({"model": "tiny", "messages": CHAT, **asked}).encode()
    answer = client.post("/v1/chat/completions", content=body, headers=JSON)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


def test_what_changes_nothing_is_taken(client):
    content = [{"type": "text", "text": "Hi"}]
    asked = {"temperature": 0, "seed": 3, "user": "me", "top_p": 0.9, "tool_choice": "none"}
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": None}]
    assert chat(client, **asked, messages=messages, max_tokens=None).status_code == 200


SURROGATE = json.dumps({"model": "tiny", "prompt": "\ud800"}).encode()


@pytest.mark.parametrize(
    ("body", "words"),
    [(b"", ""), (b"{", ""), (b"null", ""), (b"[]", ""), (SURROGATE, "surrogate")],
)
def test_a_broken_body_or_prompt_is_a_bad_request(client, body, words):
    answer = client.post("/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 400
    assert words in answer.text


def test_a_stop_text_ends_an_answer(client):
    text = complete(client, max_tokens=24).json()["choices"][0]["text"]
    assert complete(client, max_tokens=24, stop="").json()["choices"][0]["text"] == text
    stop = text[8:10]
    stopped = complete(client, max_tokens=24, stop=[stop]).json()["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == (text[: text.index(stop)], "stop")
    chunks = chunks_of(complete(client, max_tokens=24, stop=stop, stream=True))
    assert "".join(one["choices"][0]["text"] for one in chunks) == text[: text.index(stop)]


BYTES: Any = SimpleNamespace(tokenizer=ByteTokenizer())


def pieces(text: bytes, *stop: str) -> list[str]:
    """Return the answer's pieces when its tokens, which are bytes, come one by one."""
    answer = Text(BYTES, stop)
    return [*(answer.add([3 + byte]) for byte in text), answer.finish()]


def test_pieces_are_the_text_and_none_has_half_a_character():
    found = pieces(TEXT.encode())
    assert "".join(found) == TEXT
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in found)


def test_bytes_that_are_no_text_show_at_once():
    found = pieces(b"\xff\xfe" * 50 + b"a\xc3")
    assert found[:100] == ["\ufffd"] * 100
    assert "".join(found[100:]) == "a\ufffd"


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        *((TEXT, one, TEXT[: TEXT.index(one)]) for one in ("café", "naïve", "end", ", e")),
        ("one, tw", "two", "one, tw"),  # it may have begun one
    ],
)
def test_a_stop_text_ends_a_text_and_no_piece_shows_its_beginning(text, stop, shown):
    assert "".join(pieces(text.encode(), "nothing of it", stop)) == shown


def test_tokens_after_the_stop_are_not_counted():
    answer = Text(BYTES, ["b"])
    assert answer.add(ByteTokenizer().encode("abcdef")) == "a"
    assert (answer.is_stopped, answer.num_tokens) == (True, 2)


@pytest.mark.smollm2
def test_tokens_of_a_vocabulary_add_up_to_its_text():
    from kvray.reference.checkpoint import find_smollm2
    from kvray.reference.tokenizer import read

    tokenizer = CheckpointTokenizer(read("AutoTokenizer", find_smollm2()))
    text = f"<|im_start|>user\n{TEXT}\t1234<|im_end|>\n"
    tokens = tokenizer.encode(text)
    assert b"".join(map(tokenizer.bytes_of, tokens)).decode() == f"user\n{TEXT}\t1234\n"
