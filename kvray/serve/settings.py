"""The arguments of the application: `args` in a serve.yaml, `name=value` after `serve run`."""

from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml
from pydantic import BaseModel, ConfigDict, Field, Json, model_validator

from kvray.errors import ConfigError

Options: TypeAlias = dict[str, Any] | Json[dict[str, Any]]
Words: TypeAlias = list[str] | Json[list[str]]
"""On the command line every value is text."""


class Settings(BaseModel):
    """What is served, and how: docs/serving.md says it of each."""

    model_config = ConfigDict(extra="forbid")

    engine: Literal["auto", "reference", "tensorrt_llm", "vllm"] = "auto"
    model: str = "smollm2"
    model_name: str | None = None  # what clients call it; else `model`
    num_replicas: int = Field(default=2, ge=1, le=1000)
    autoscaling_config: Options | None = None  # in place of num_replicas, as Serve has it
    num_gpus: float = Field(default=0, ge=0)  # of each engine
    kvray_config: Path | None = None  # on every node; else what KVRAY_CONFIG of Ray names
    engine_options: Options = {}
    options_file: Path | None = None  # of further engine_options, on every node
    server_args: Words = []  # further words of the command that starts the server
    command: Words | None = None  # in place of it, with {model}, {host}, {port} and {options}
    paths: Words = ["/v1"]  # what is handed on to the engines, with what is below
    body_bytes_max: int = Field(default=64 << 20, ge=1)
    body_timeout_s: float = Field(default=60, gt=0)
    renderers: int = Field(default=2, ge=0)  # processes of an ingress
    start_timeout_s: float = Field(default=600, gt=0)
    request_timeout_s: float = Field(default=300, gt=0)
    stall_timeout_s: float = Field(default=120, gt=0)  # longer than the longest prefill
    drain_timeout_s: float = Field(default=30, ge=0)
    prefetch_timeout_s: float = Field(default=0.5, ge=0, le=10)  # 0: none
    router: Literal["kvray", "serve"] = "kvray"
    pool_blocks: int = Field(default=4096, ge=1)  # as the router takes it where no events tell
    pool_events: bool = False
    requests_max: int = Field(default=64, ge=1)  # under way at one engine
    queued_max: int = Field(default=64, ge=1)  # that wait for an engine

    @model_validator(mode="after")
    def _refuse_two_numbers(self) -> "Settings":
        if self.autoscaling_config is not None and "num_replicas" in self.model_fields_set:
            raise ValueError(
                "num_replicas and autoscaling_config exclude each other; write min_replicas and"
                " max_replicas in the second."
            )
        if self.pool_events and self.engine == "vllm":
            raise ValueError("pool_events is for the other engines; vLLM publishes by itself.")
        return self

    def options(self) -> dict[str, Any]:
        """Return the options of the engine, those of the file too.

        Raises:
            ConfigError: the file cannot be read, or has none.
        """
        if self.options_file is None:
            return dict(self.engine_options)
        try:
            given = yaml.safe_load(self.options_file.read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"options_file cannot be read ({error}).") from None
        if not isinstance(given, dict):
            raise ConfigError(f"{self.options_file} has no options; write `name: value` there.")
        return {**given, **self.engine_options}

    @property
    def is_tiny(self) -> bool:
        """Whether the model is the reference engine's own, with random weights."""
        return self.model.partition(":")[0] == "tiny"

    @property
    def served_name(self) -> str:
        """What clients call the model."""
        return self.model_name or self.model
