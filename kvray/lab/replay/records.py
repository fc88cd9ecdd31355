"""The records of both trace formats, checked: Mooncake's lines and agentic sessions."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvray.errors import ConfigError

Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Id = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class _Record(BaseModel):
    model_config = ConfigDict(strict=True)


class MooncakeLine(_Record):
    """One request of a file in FAST25-release/traces of kvcache-ai/Mooncake."""

    timestamp: Time
    """Milliseconds."""
    input_length: Count
    hash_ids: list[Id]


class Step(_Record):
    """One request of a session, or a subagent with requests of its own."""

    t: Time
    """Seconds since the start of the session, or of the subagent."""
    num_tokens: Count = Field(alias="in", default=0)
    hash_ids: list[Id] = []
    model: Any = ""
    """Blocks of different models differ, even under equal ids."""
    requests: list[Step] | None = None
    """Of a subagent that started at `t`; None: it is a request."""


class SessionFile(_Record):
    """A traces/trace_NNNN.json of callanjfox/kv-cache-tester."""

    block_size: Annotated[int, Field(ge=1, lt=2**63)]
    hash_id_scope: Any = "local"
    requests: list[Step]


R = TypeVar("R", bound=_Record)


def parse(kind: type[R], content: bytes, where: str) -> R:
    """Return the record in `content`; ConfigError: it is damaged, `where` says which one."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        wrong = f" is no JSON ({first['ctx']['error']})"
    elif not first["loc"]:
        wrong = " is no JSON object"
    elif first["type"] == "missing":
        wrong = f": {_field(first['loc'])} is missing"
    else:
        shown = json.dumps(first["input"], default=str)[:40]
        complaint = first["msg"].replace("Input should", "must")
        wrong = f": {_field(first['loc'])} {complaint}, and is {shown}"
    raise ConfigError(f"{where}{wrong}; get the file again, or take the record out.")


def check_blocks(num_blocks: int, num_tokens: int, block_tokens: int, where: str) -> None:
    """Raise ConfigError if the tokens do not make so many blocks; the last may be partial."""
    if not num_tokens // block_tokens <= num_blocks <= -(-num_tokens // block_tokens):
        raise ConfigError(
            f"{where}: {num_tokens} tokens are not {num_blocks} blocks of {block_tokens} tokens;"
            " give the size of the trace's blocks with --block-tokens, or get the file again."
        )


def _field(location: tuple[int | str, ...]) -> str:
    """Return a path such as `requests[1].hash_ids`."""
    parts = (f"[{at}]" if isinstance(at, int) else f".{at}" for at in location)
    return "".join(parts).removeprefix(".")
