"""A request's prompt as the engine will see it: a hint for routing, and nothing else.

The engine renders and checks requests itself. What cannot be rendered here goes by load alone, and
a wrong guess costs a worse route. So nothing here refuses a request.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvray.errors import KVRayError
from kvray.reference.tokenizer import ByteTokenizer, import_transformers
from kvray.serve.settings import Settings

Tokens = npt.NDArray[np.int32]

_CACHED_CHARACTERS_MAX = 32 << 20
_SEGMENT_MIN = 64
"""Shorter texts are not worth a place in the cache."""
_OF_TOKENIZER = ("trust_remote_code", "revision")
_PARTS_LOOP = re.compile(r"in\s+message(\.content|\[['\"]content['\"]\])")


class Hint(NamedTuple):
    """What a request's blocks hang on."""

    tokens: Tokens
    """Token ids, shape [num_tokens]."""
    salt: str | None
    is_stream: bool = False
    """Whether its answer's first token is seen when it comes."""


class Texts:
    """Tokens of texts, of which only the parts that are new are computed.

    A tokenizer cuts a text at its special tokens first. So a conversation is cut there too, and
    the tokens of each piece are kept: a turn costs what it adds. A tokenizer that joins pieces
    otherwise is found out at the start, and is then given whole texts.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Use a tokenizer of transformers."""
        self._tokenizer = tokenizer
        self._kept: OrderedDict[str, Tokens] = OrderedDict()
        self._num_characters = 0
        specials = sorted(map(str, tokenizer.all_special_tokens), key=len, reverse=True)
        self._cut = (
            re.compile(f"(?=(?:{'|'.join(map(re.escape, specials))}))") if specials else None
        )
        if self._cut is not None and not all(
            np.array_equal(self.encode(text), self._encode(text, is_first=False))
            for text in (f"{one}a b {one} c\n{one}{one}\n d" for one in specials)
        ):
            self._cut = None

    def encode(self, text: str, *, adds_special: bool = False) -> Tokens:
        """Return the tokens of a text; `adds_special`: with those that begin every text."""
        if adds_special or self._cut is None:
            return self._encode(text, is_first=adds_special)
        pieces = [self._piece(one) for one in self._cut.split(text) if one]
        return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int32)

    def _piece(self, text: str) -> Tokens:
        tokens = self._kept.get(text)
        if tokens is not None:
            self._kept.move_to_end(text)
            return tokens
        tokens = self._encode(text, is_first=False)
        if len(text) >= _SEGMENT_MIN:
            self._kept[text] = tokens
            self._num_characters += len(text)
            while self._num_characters > _CACHED_CHARACTERS_MAX:
                self._num_characters -= len(self._kept.popitem(last=False)[0])
        return tokens

    def _encode(self, text: str, *, is_first: bool) -> Tokens:
        found = self._tokenizer.encode(text, add_special_tokens=is_first)
        return np.array(found, dtype=np.int32)


class Prompts:
    """The prompts of one model's requests."""

    def __init__(self, encode: Callable[..., Tokens], template: Any, *, adds_special: bool) -> None:
        """Render chats by `template`, transformers' tokenizer; None: the model has no template.

        `encode`: as `Texts.encode`. `adds_special`: the engine begins a completion's text with the
        tokenizer's special tokens.
        """
        self._encode = encode
        self._template = template
        self._adds_special = adds_special
        source = getattr(template, "chat_template", None)
        self._takes_parts = isinstance(source, str) and bool(_PARTS_LOOP.search(source))

    def hint(self, path: str, body: bytes) -> Hint | None:
        """Return what is known of the prompt that `body` asks about; None: nothing."""
        try:
            read, asked = READERS[path], json.loads(body)
            tokens = np.asarray(read(self, asked), dtype=np.int32)
            salt, is_stream = asked.get("cache_salt"), bool(asked.get("stream"))
        except Exception:  # noqa: BLE001 - templates and tokenizers raise anything; the engine answers
            return None
        salt = salt if isinstance(salt, str) else None
        return Hint(tokens, salt, is_stream) if len(tokens) else None

    def completion(self, asked: Mapping[str, Any]) -> Any:
        """Return the tokens of a completion; of several prompts those of the first."""
        prompt = asked["prompt"]
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if not isinstance(prompt, str):
            return prompt
        adds = asked.get("add_special_tokens", self._adds_special)
        return self._encode(prompt, adds_special=bool(adds) and self._adds_special)

    def chat(self, asked: Mapping[str, Any]) -> Tokens:
        """Return the tokens of a chat, up to where the assistant begins to speak.

        A model without a template of its own, which was trained for no chat, is given one line
        `role: content` for each message.
        """
        messages = [self._message(one) for one in asked["messages"]]
        if self._template is None:
            lines = [f"{one['role']}: {one['content']}\n" for one in messages]
            return self._encode("".join([*lines, "assistant:"]))
        text = self._template.apply_chat_template(
            messages,
            tools=asked.get("tools") or None,
            documents=asked.get("documents"),
            add_generation_prompt=asked.get("add_generation_prompt", True),
            continue_final_message=asked.get("continue_final_message", False),
            tokenize=False,
            chat_template=None,  # one of the client's would run here, and need not end
            **(asked.get("chat_template_kwargs") or {}),
        )
        return self._encode(text, adds_special=bool(asked.get("add_special_tokens", False)))

    def response(self, asked: Mapping[str, Any]) -> Tokens:
        """Return the tokens of a request of OpenAI's Responses, which is another form of a chat."""
        if asked.get("previous_response_id"):
            raise KVRayError("Its beginning is not here.")
        said = asked["input"]
        items = [{"role": "user", "content": said}] if isinstance(said, str) else said
        return self._as_chat(asked, [*map(_of_item, items)], "instructions", "parameters")

    def message(self, asked: Mapping[str, Any]) -> Tokens:
        """Return the tokens of a request of Anthropic's Messages, likewise."""
        messages = [made for one in asked["messages"] for made in _of_blocks(one)]
        return self._as_chat(asked, messages, "system", "input_schema")

    def _as_chat(
        self, asked: Mapping[str, Any], messages: list[Any], system: str, parameters: str
    ) -> Tokens:
        """Return the tokens of a chat; the other form has a system's text and parameters so."""
        if asked.get(system):
            messages = [{"role": "system", "content": asked[system]}, *messages]
        names = {"name": "name", "description": "description", "parameters": parameters}
        tools = [
            {key: one[given] for key, given in names.items() if one.get(given) is not None}
            for one in asked.get("tools") or ()
        ]
        as_functions = [{"type": "function", "function": one} for one in tools]
        return self.chat({"messages": messages, "tools": as_functions})

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message as chat templates take it."""
        made = {name: one for name, one in message.items() if one is not None}
        content = message.get("content")
        if isinstance(content, list):
            texts = [one if isinstance(one, str) else _text_of(one) for one in content]
            as_parts = [{"type": "text", "text": text} for text in texts]
            content = as_parts if self._takes_parts else "\n".join(texts)
        made["content"] = "" if content is None else content
        if "tool_calls" in made:
            made["tool_calls"] = [_called(one) for one in made["tool_calls"]]
        return made


READERS = {
    "/v1/completions": Prompts.completion,
    "/v1/chat/completions": Prompts.chat,
    "/v1/responses": Prompts.response,
    "/v1/messages": Prompts.message,
}
"""How the prompts of requests that ask for an answer are read, by path."""


def load_prompts(settings: Settings, *, engine: str) -> Prompts:
    """Return the tokenizer and template that the engine's server uses.

    Raises:
        KVRayError: they cannot be loaded.
    """
    options = settings.options()
    if settings.is_tiny:
        return Prompts(_bytes_of, None, adds_special=False)
    name = str(options.get("tokenizer") or settings.model)
    if engine == "reference" and name == "smollm2":
        from kvray.reference.checkpoint import find_smollm2

        name = str(find_smollm2())
    given = {key: options[key] for key in _OF_TOKENIZER if key in options}
    try:
        tokenizer = import_transformers().AutoTokenizer.from_pretrained(name, **given)
        if own := options.get("chat_template"):  # a file, or the template itself
            tokenizer.chat_template = Path(own).read_text() if Path(own).is_file() else own
    except Exception as error:  # a hub's, a file's, or of the checkpoint's own code
        raise KVRayError(f"The tokenizer of {name} cannot be loaded ({error}).") from error
    template = None if getattr(tokenizer, "chat_template", None) is None else tokenizer
    return Prompts(Texts(tokenizer).encode, template, adds_special=engine != "reference")


def _bytes_of(text: str, *, adds_special: bool = False) -> Tokens:
    """Return the tokens of the reference engine's random weights, which are bytes."""
    return np.array(ByteTokenizer().encode(text), dtype=np.int32)


def _text_of(part: Mapping[str, Any]) -> str:
    if part.get("type") not in ("text", "input_text", "output_text"):
        raise KVRayError("An image or a file is not rendered.")
    return str(part["text"])


def _called(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool's call with its arguments as an object, as templates and engines have them."""
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}


def _call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    called = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": called}


def _of_item(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item of Responses as a message of a chat."""
    kind = item.get("type", "message")
    if kind == "message":
        return {"role": item["role"], "content": item["content"]}
    if kind == "function_call":
        call = _call(item["call_id"], item["name"], item["arguments"])
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
    raise KVRayError(f"An item of type {kind} is not rendered.")


def _of_blocks(message: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """Return a message of Anthropic's as those of a chat."""
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    made, calls, texts = list[dict[str, Any]](), list[dict[str, Any]](), list[Any]()
    for one in content:
        if one["type"] == "tool_result":
            said = one.get("content", "")
            made.append({"role": "tool", "tool_call_id": one["tool_use_id"], "content": said})
        elif one["type"] == "tool_use":
            calls.append(_call(one["id"], one["name"], one["input"]))
        else:
            texts.append(one)
    if texts or calls:
        made.append({"role": role, "content": texts or None})
        if calls:
            made[-1]["tool_calls"] = calls
    return made
