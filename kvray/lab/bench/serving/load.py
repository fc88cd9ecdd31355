"""Sends the requests of a round to one endpoint as they come, and notes what it answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvray.errors import ConfigError, KVRayError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

REPLICA_HEADER = "x-kvray-replica"
_HELLO_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An endpoint that is measured; `url` is without the `/v1`."""

    name: str
    url: str
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A request, and when it is to be sent, in seconds since the start of the round."""

    at_s: float
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of a request; times are seconds since it was due."""

    error: str = ""
    """Why there is no answer; empty: there is one."""
    text: str = ""
    replica: str = ""
    """The one that answered; empty: the endpoint does not say."""
    first_token_s: float = 0.0
    whole_s: float = 0.0
    cached_tokens: int | None = None
    """Of the prompt's tokens, those that were not computed; None: the endpoint does not say."""


def parse_endpoint(text: str) -> tuple[str, str]:
    """Return name and URL of a `--url`; without a name, the URL is it. ConfigError: it is none."""
    name, is_named, url = text.rpartition("=")
    if not is_named:
        name = url
    url = url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {text}: give NAME=http://host:port.")
    return name, url


async def ask_model(name: str, url: str) -> str:
    """Return the first model that an endpoint lists; KVRayError: there is none, or no answer."""
    openai = _openai()
    async with _client(url, timeout_s=_HELLO_TIMEOUT_S) as client:
        try:
            models = await asyncio.wait_for(client.models.list(), _HELLO_TIMEOUT_S)
        except (openai.OpenAIError, asyncio.TimeoutError) as error:
            raise KVRayError(f"{name} does not answer at {url} ({error or 'too slow'}).") from None
    if not models.data:
        raise KVRayError(f"{name} at {url} lists no model; give its name with --model.")
    return str(models.data[0].id)


async def play(
    endpoint: Endpoint,
    requests: Sequence[Due],
    *,
    max_tokens: int,
    timeout_s: float,
    advance: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """Send each request when it is due, and return the answers; one that is late has failed."""
    openai = _openai()
    async with _client(endpoint.url, timeout_s=timeout_s) as client:
        began = time.monotonic()

        async def one(due: Due) -> Answer:
            due_at = began + due.at_s
            await asyncio.sleep(due_at - time.monotonic())
            asking = _ask(client, endpoint.model, due.tokens, max_tokens, due_at)
            try:
                answer = await asyncio.wait_for(asking, timeout_s)
            except asyncio.TimeoutError:
                answer = Answer(error=f"no whole answer in {timeout_s:g} s")
            except openai.OpenAIError as error:
                answer = Answer(error=str(error) or type(error).__name__)
            advance()
            return answer

        return list(await asyncio.gather(*map(one, requests)))


def _openai() -> Any:
    try:
        import openai
    except ModuleNotFoundError:
        raise ConfigError("This bench needs openai: run pip install 'kvray[serve]'.") from None
    return openai


def _client(url: str, *, timeout_s: float) -> AsyncOpenAI:
    client: AsyncOpenAI = _openai().AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=timeout_s
    )
    return client


async def _ask(
    client: AsyncOpenAI, model: str, tokens: Sequence[int], max_tokens: int, due_at: float
) -> Answer:
    raw = await client.completions.with_raw_response.create(
        model=model,
        prompt="",
        # The client would look at each token of `prompt`: 26 ms for 800 of them.
        extra_body={"prompt": list(tokens)},
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    first_token_s, cached, pieces = None, None, []
    async for chunk in raw.parse():
        if chunk.choices and first_token_s is None:
            first_token_s = time.monotonic() - due_at
        pieces += [choice.text for choice in chunk.choices]
        if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            cached = chunk.usage.prompt_tokens_details.cached_tokens
    if first_token_s is None:
        return Answer(error="the answer has no token")
    return Answer(
        text="".join(pieces),
        replica=raw.headers.get(REPLICA_HEADER, ""),
        first_token_s=first_token_s,
        whole_s=time.monotonic() - due_at,
        cached_tokens=cached,
    )
