"""OpenAI's protocol: what is asked, checked; what is answered, as JSON."""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

_NEUTRAL: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "temperature": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "logprobs": False,
    "echo": False,
    "suffix": "",
    "tools": [],
    "response_format": {"type": "text"},
}
"""What may be asked for because it changes nothing in a greedy answer. Anything else is refused: an
answer that is not what was asked for is worse than none."""
_WITHOUT_EFFECT = ("top_p", "seed", "user", "metadata", "store", "parallel_tool_calls")


class RequestError(Exception):
    """An answer with an error's status, in OpenAI's shape."""

    def __init__(
        self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code, self._param = code, param

    def body(self) -> dict[str, Any]:
        """Return the answer's JSON."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        told = {"message": str(self), "type": kind, "param": self._param, "code": self.code}
        return {"error": told}


class StreamOptions(BaseModel):
    """How a stream ends."""

    include_usage: bool = False


class _Asked(BaseModel):
    """What both kinds of request have."""

    model_config = ConfigDict(extra="allow")

    model: str
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)

    @model_validator(mode="after")
    def _refuse_what_is_not_done(self) -> "_Asked":
        for name, value in (self.model_extra or {}).items():
            if value is None or name in _WITHOUT_EFFECT or value == _NEUTRAL.get(name):
                continue
            if name in _NEUTRAL:
                raise ValueError(
                    f"{name}={value!r} is not supported: this server samples greedily, one answer"
                    " a request; leave it out."
                )
            raise ValueError(f"there is no argument {name!r} here; leave it out.")
        return self

    @property
    def stop_texts(self) -> list[str]:
        """The texts that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage(self) -> bool:
        """Whether a stream is to end with what it used."""
        return self.stream_options is not None and self.stream_options.include_usage


def _single(prompt: Any) -> Any:
    """Return the one prompt of a list; token ids are one prompt."""
    if not isinstance(prompt, list) or all(isinstance(item, int) for item in prompt):
        return prompt
    if len(prompt) > 1:
        raise ValueError("This server takes one prompt a request.")
    return prompt[0]


class CompletionRequest(_Asked):
    """The body of /v1/completions."""

    prompt: Annotated[str | list[int], BeforeValidator(_single)]
    max_tokens: int = Field(default=16, ge=1)


class TextPart(BaseModel):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def plain(self) -> dict[str, str]:
        """Return it as chat templates take it."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        return {"role": role, "content": "".join(part.text for part in self.content)}


class ChatRequest(_Asked):
    """The body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    @property
    def limit(self) -> int:
        """The longest answer, in tokens."""
        return self.max_completion_tokens or self.max_tokens or 256


def describe_model(name: str, created: int) -> dict[str, Any]:
    """Return an entry of /v1/models."""
    return {"id": name, "object": "model", "created": created, "owned_by": "kvray"}


def usage(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int | None,
    by_source: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return the counts.

    Args:
        prompt_tokens: in the prompt.
        completion_tokens: in the answer.
        cached_tokens: of the prompt's, those that engine or tier had; None: not known, because a
            stop text ended the answer before the engine did.
        by_source: these by where they were; None: the engine does not say.
    """
    details = {"cached_tokens": cached_tokens, "cached_tokens_by_source": by_source}
    known = {name: value for name, value in details.items() if value is not None}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        **({"prompt_tokens_details": known} if known else {}),
    }


class Writer:
    """Writes one answer of /v1/completions: whole, or as the chunks of a stream."""

    _prefix, _whole, _chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str) -> None:
        name = f"{self._prefix}-{uuid.uuid4().hex}"
        self._head = {"id": name, "created": int(time.time()), "model": model}

    def whole(self, text: str, finish_reason: str, used: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of a request that is no stream."""
        return {**self._made(self._whole, self._message(text), finish_reason), "usage": used}

    def opening(self) -> Sequence[dict[str, Any]]:
        """Return the chunks before the first text."""
        return ()

    def chunk(self, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        """Return a piece of a stream."""
        return self._made(self._chunk, self._delta(text), finish_reason)

    def usage_chunk(self, used: dict[str, Any]) -> dict[str, Any]:
        """Return the last chunk of a stream whose client wants to know."""
        return {**self.chunk(""), "choices": [], "usage": used}

    def _message(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _made(self, kind: str, said: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, **said, "finish_reason": finish_reason}
        return {**self._head, "object": kind, "choices": [choice]}


class ChatWriter(Writer):
    """The same for /v1/chat/completions."""

    _prefix, _whole, _chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> Sequence[dict[str, Any]]:
        """Return the chunk that says who speaks."""
        return (self._made(self._chunk, {"delta": {"role": "assistant", "content": ""}}, None),)

    def _message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}
