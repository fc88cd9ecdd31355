"""What is asked through kvray.serve and of an engine's server itself: the answers must be equal."""

import json
import math
import re
import urllib.error
import urllib.request
from typing import Any, NamedTuple

_DEADLINE_S = 300.0
_JSON = {"content-type": "application/json"}


class Case(NamedTuple):
    """A request below `/v1/`."""

    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = {}  # noqa: RUF012 - nobody changes it

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.body[:60]!r}"


HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
LOOK = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
SAW = {"role": "tool", "tool_call_id": "1", "content": "a door"}
LONG = "The keeper counts the lamps of the third room, one after the other. " * 40
USAGE = {"include_usage": True}

_COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": "Once upon a time", "max_tokens": 5},
    {"prompt": "Once", "max_tokens": 5, "stream": True},
    {"prompt": "Once", "max_tokens": 5, "stream": True, "stream_options": USAGE},
    {"prompt": ["one", "two"], "max_tokens": 3, "n": 3, "seed": 1, "temperature": 1},
    {"prompt": "Once", "max_tokens": 5, "n": 3, "temperature": 0.7, "seed": 1},
    {"prompt": [5, 6, 7], "max_tokens": 3, "stop": ["a", "b"]},
    {"prompt": [[5, 6], [7]], "max_tokens": 3},
    {"prompt": "", "max_tokens": 3},
    {"prompt": [], "max_tokens": 3},
    {"prompt": [2**40], "max_tokens": 3},
    {"prompt": "na\u00efve \U0001f389 \u65e5", "max_tokens": 3, "logprobs": 2},
    {"prompt": "caf\u00e9 \U0001f468\u200d\U0001f469", "max_tokens": 9, "stream": True},
    {"prompt": "Once", "max_tokens": 3, "echo": True},
    {"prompt": LONG, "max_tokens": 4},
    {"prompt": LONG, "max_tokens": 4, "stream": True},
    {"prompt": [7] * 100_000, "max_tokens": 2},
    {"prompt": "Once", "max_tokens": -1},
    {"prompt": "Once", "max_tokens": 3, "stream": "perhaps"},
    {"prompt": "Once", "max_tokens": 3, "cache_salt": "s"},
    {"prompt": "Once", "max_tokens": 3, "model": "gpt-5"},
    {"max_tokens": 3},
]  # fmt: skip
_CHATS: list[dict[str, Any]] = [
    {"messages": HI, "max_tokens": 5},
    {"messages": HI, "max_tokens": 5, "n": 3, "stream": True},
    {"messages": HI, "max_tokens": None, "max_completion_tokens": 3},
    {"messages": HI, "max_tokens": 5, "stream": True, "stream_options": USAGE},
    {"messages": HI, "max_tokens": 5, "temperature": 0.7, "seed": 3},
    {"messages": HI, "max_tokens": 5, "temperature": 0.7, "seed": 3, "n": 3},
    {"messages": HI, "max_tokens": 3, "logprobs": True, "top_logprobs": 2},
    {"messages": HI, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, "stream": True},
    {"messages": HI, "max_tokens": 8, "stop": ["e", "."]},
    {"messages": HI, "max_tokens": 8, "stop": "e", "stream": True},
    {"messages": HI, "max_tokens": 5, "tools": [LOOK], "tool_choice": "auto"},
    {"messages": HI, "max_tokens": 24, "tools": [LOOK], "tool_choice": "required"},
    {"messages": HI, "max_tokens": 5, "tools": [LOOK], "tool_choice": "none", "stream": True},
    {"messages": [*HI, CALLED], "max_tokens": 5},
    {"messages": [*HI, CALLED, SAW], "max_tokens": 5, "tools": [LOOK]},
    {"messages": [*HI, CALLED, SAW], "max_tokens": 5, "tools": [LOOK], "stream": True},
    {"messages": HI, "max_tokens": 12, "response_format": {"type": "json_object"}},
    {
        "messages": HI,
        "max_tokens": 24,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    },
    {"messages": HI, "prompt_cache_key": "k", "max_tokens": 2},
    {"messages": HI, "max_tokens": 100_000},
    {"messages": HI, "max_tokens": 100_000, "stream": True},
    {"messages": [{"role": "system", "content": LONG}, *HI], "max_tokens": 4},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "max_tokens": 3},
    {"messages": [{"role": "user", "content": "\u65e5\U0001f389 caf\u00e9"}], "max_tokens": 6},
    {"messages": [{"role": "tool", "content": "x"}], "max_tokens": 3},
    {"messages": [{"role": "pilot", "content": "x"}], "max_tokens": 3},
    {"messages": [{"role": "assistant", "content": "Well,"}, *HI], "max_tokens": 3},
    {"messages": [], "max_tokens": 3},
    {"messages": HI, "max_tokens": 3, "model": "gpt-5"},
    {"messages": HI, "max_tokens": 3, "temperature": 9},
    {"messages": HI, "max_tokens": 3, "chat_template_kwargs": {"a": 1}},
]  # fmt: skip
_BROKEN: list[bytes] = [
    b"",
    b"{",
    b"null",
    b'{"model": "%s", "prompt": "\\ud800", "max_tokens": 2}',
    b'{"model": "%s", "messages": [{"role": "user", "content": "\\ud83c"}], "max_tokens": 2}',
    b'{"model": "%s", "prompt": "\xff", "max_tokens": 2}',
    b'{"model": "%s", "prompt": "Once", "max_tokens": 2',
]
_OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": HI, "max_tokens": 4}),
    ("messages", {"messages": HI, "max_tokens": 4, "stream": True}),
    ("messages", {"messages": HI}),
    ("responses", {"input": "Hi", "max_output_tokens": 4}),
    ("responses", {"input": 7}),
    ("embeddings", {"input": "Once"}),
    ("nowhere", {}),
]


def cases(model: str) -> list[Case]:
    def body(asked: dict[str, Any]) -> bytes:
        return json.dumps({"model": model, "temperature": 0, **asked}).encode()

    posted = [
        *(("completions", body(one)) for one in _COMPLETIONS),
        *(("chat/completions", body(one)) for one in _CHATS),
        *((path, body(asked)) for path, asked in _OTHERS),
        *(
            (path, one.replace(b"%s", model.encode()))
            for path in ("completions", "chat/completions", "messages")
            for one in _BROKEN
        ),
    ]
    first = body(_COMPLETIONS[0])
    return [
        *(Case("POST", path, said, _JSON) for path, said in posted),
        Case("POST", "completions", first),
        Case("POST", "completions", first, {"content-type": "text/plain"}),
        Case("POST", "completions?a=b%20c&a=", first, _JSON),
        Case("GET", "models"),
        Case("HEAD", "models"),
        Case("GET", f"models/{model}"),
        Case("GET", "models/gpt%2F5"),
        Case("GET", "completions"),
        Case("DELETE", f"models/{model}"),
        Case("OPTIONS", "completions", headers={"origin": "http://elsewhere"}),
        Case("GET", "nowhere/%C3%A4/..%2f"),
    ]


_OURS = {"date", "server", "x-request-id", "content-length", "transfer-encoding", "connection"}
"""Headers of one connection, and what each server says of itself."""
_DIFFERENT = re.compile(
    rb'"(?:chatcmpl|cmpl|chatcmpl-tool|call|resp|msg|fc|rs|modelperm)[-_]?[\w-]+"'  # ids
    rb'|"created(?:_at)?": ?[\d.]+'
    rb'|"(?:prompt_tokens_details|kv_transfer_params|input_tokens_details)": ?(?:null|{.*?}+)'
)
"""Ids and times; and how much of a prompt was known, which the second that asks finds otherwise."""
_CHOICE = re.compile(rb'"choices": ?\[\{"index": ?(\d+)')


def _by_choice(said: bytes) -> bytes:
    """Return a stream with the chunks of each choice in a row: how choices mix is the engine's."""

    def choice(chunk: bytes) -> float:
        found = _CHOICE.search(chunk)
        return int(found[1]) if found else math.inf

    return b"\n\n".join(sorted(said.split(b"\n\n"), key=choice))


def told_by(url: str, case: Case) -> tuple[int, dict[str, str], bytes]:
    """Return the status, headers and body of an answer, without what differs from time to time."""
    asked = urllib.request.Request(
        f"{url}{case.path}", case.body or None, case.headers, method=case.method
    )
    if "content-type" not in case.headers:
        asked.add_unredirected_header("content-type", "")
    try:
        answer = urllib.request.urlopen(asked, timeout=_DEADLINE_S)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        said, status = answer.read(), int(answer.status)
        own = {name.lower(): value for name, value in answer.headers.items()}
    kept = {name: one for name, one in own.items() if name not in _OURS and "kvray" not in name}
    said = _DIFFERENT.sub(b"", said)
    return status, kept, _by_choice(said) if said.startswith(b"data: ") else said
