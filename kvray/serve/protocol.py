"""OpenAI's protocol: what is asked, checked; what is answered, in the types of their package."""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from openai.types import Completion, CompletionChoice, CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.completion_usage import PromptTokensDetails
from openai.types.shared import ErrorObject
from pydantic import BaseModel, ConfigDict, Field, model_validator

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "temperature": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "response_format": ({"type": "text"},),
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
        self._code, self._param = code, param

    def body(self) -> dict[str, Any]:
        """Return the answer's JSON."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = ErrorObject(code=self._code, message=str(self), param=self._param, type=kind)
        return {"error": error.model_dump(include={"code", "message", "param", "type"})}


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

    @model_validator(mode="after")
    def _refuse_what_is_not_done(self) -> "_Asked":
        for name, value in (self.model_extra or {}).items():
            if value is None or name in _WITHOUT_EFFECT or value in _NEUTRAL.get(name, ()):
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


class CompletionRequest(_Asked):
    """The body of /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int = Field(default=16, ge=1)

    def single_prompt(self) -> str | list[int]:
        """Return the prompt, text or token ids.

        Raises:
            RequestError: there are several.
        """
        if isinstance(self.prompt, str) or all(isinstance(item, int) for item in self.prompt):
            return self.prompt  # type: ignore[return-value]
        if len(self.prompt) > 1:
            raise RequestError("This server takes one prompt a request.", param="prompt")
        return self.prompt[0]  # type: ignore[return-value]


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
    return Model(id=name, created=created, object="model", owned_by="kvray").model_dump(
        exclude_none=True
    )


def usage(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int | None,
    by_source: Mapping[str, int] | None = None,
) -> CompletionUsage:
    """Return the counts.

    Args:
        prompt_tokens: in the prompt.
        completion_tokens: in the answer.
        cached_tokens: of the prompt's, those that engine or tier had; None: not known, because a
            stop text ended the answer before the engine did.
        by_source: these by where they were; None: the engine does not say.
    """
    used = CompletionUsage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )
    if cached_tokens is not None:
        # Their types keep fields that they do not know.
        more = {} if by_source is None else {"cached_tokens_by_source": dict(by_source)}
        used.prompt_tokens_details = PromptTokensDetails.model_validate(
            {"cached_tokens": cached_tokens, **more}
        )
    return used


class Writer:
    """Writes one answer of /v1/completions: whole, or as the chunks of a stream."""

    prefix = "cmpl"

    def __init__(self, model: str) -> None:
        self._model = model
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def whole(self, text: str, finish_reason: str, used: CompletionUsage) -> dict[str, Any]:
        """Return the answer of a request that is no stream."""
        return self._completion(text, finish_reason, used)

    def opening(self) -> Sequence[dict[str, Any]]:
        """Return the chunks before the first text."""
        return ()

    def chunk(self, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        """Return a piece of a stream."""
        return self._completion(text, finish_reason, None)

    def usage_chunk(self, used: CompletionUsage) -> dict[str, Any]:
        """Return the last chunk of a stream whose client wants to know."""
        return {**self.chunk(""), "choices": [], "usage": used.model_dump(exclude_unset=True)}

    def _completion(
        self, text: str, finish_reason: str | None, used: CompletionUsage | None
    ) -> dict[str, Any]:
        # Their type has no answer that goes on, though their streams consist of such.
        choice = CompletionChoice.model_construct(index=0, text=text, finish_reason=finish_reason)
        made = Completion(
            id=self._id,
            object="text_completion",
            created=self._created,
            model=self._model,
            choices=[choice],
        )
        if used is not None:
            made.usage = used
        return made.model_dump(exclude_unset=True, warnings=False)


class ChatWriter(Writer):
    """The same for /v1/chat/completions."""

    prefix = "chatcmpl"

    def whole(self, text: str, finish_reason: str, used: CompletionUsage) -> dict[str, Any]:
        """Return the answer of a request that is no stream."""
        message = ChatCompletionMessage(role="assistant", content=text)
        made = ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._model,
            choices=[Choice(index=0, message=message, finish_reason=finish_reason)],  # type: ignore[arg-type]
            usage=used,
        )
        return made.model_dump(exclude_unset=True)

    def opening(self) -> Sequence[dict[str, Any]]:
        """Return the chunk that says who speaks."""
        return (self._delta(ChoiceDelta(role="assistant", content=""), None),)

    def chunk(self, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        """Return a piece of a stream."""
        delta = ChoiceDelta(content=text) if text or finish_reason is None else ChoiceDelta()
        return self._delta(delta, finish_reason)

    def _delta(self, delta: ChoiceDelta, finish_reason: str | None) -> dict[str, Any]:
        choice = ChunkChoice(index=0, delta=delta, finish_reason=finish_reason)  # type: ignore[arg-type]
        made = ChatCompletionChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model,
            choices=[choice],
        )
        return made.model_dump(exclude_unset=True)
