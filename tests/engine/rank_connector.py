"""The connector over a dict for engines of several ranks: the dict is a directory.

Each rank is a process, so a test sees of the other ranks what they leave in files below the
directory that `DIRECTORY_VARIABLE` names: blocks, and a journal of the calls of each rank.
"""

import hashlib
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvray.reference.engine_options import KvConnectorConfig
from tests.engine import fake_connector
from tests.engine.fake_connector import Key

DIRECTORY_VARIABLE = "RANK_CONNECTOR_DIRECTORY"
CONFIG = KvConnectorConfig(
    connector_module="tests.engine.rank_connector",
    connector_scheduler_class="Scheduler",
    connector_worker_class="Worker",
)


class Blocks(MutableMapping[Key, torch.Tensor]):
    """Blocks in files; with attention data parallelism all ranks have one directory of them."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory

    def __getitem__(self, key: Key) -> torch.Tensor:
        try:
            return torch.from_numpy(np.load(self._path(key)))
        except FileNotFoundError:
            raise KeyError(key) from None

    def __setitem__(self, key: Key, block: torch.Tensor) -> None:
        partial = self._directory / f"{os.getpid()}.partial.npy"
        np.save(partial, block.numpy())
        partial.rename(self._path(key))

    def __delitem__(self, key: Key) -> None:
        self._path(key).unlink()

    def __iter__(self) -> Iterator[Key]:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(list(self._directory.iterdir()))

    def _path(self, key: Key) -> Path:
        return self._directory / f"{hashlib.sha256(repr(key).encode()).hexdigest()}.npy"


class Journal(list[tuple[Any, ...]]):
    """Calls that are also lines of a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def append(self, call: tuple[Any, ...]) -> None:
        super().append(call)
        with self._path.open("a") as file:
            file.write(f"{call[0]}\n")


class Scheduler(fake_connector.Scheduler):
    supports_attention_dp = True

    def __init__(self, llm_args: Any) -> None:
        prepare(llm_args)
        super().__init__(llm_args)


class Worker(fake_connector.Worker):
    """Later ranks take longer to load."""

    supports_attention_dp = True

    def __init__(self, llm_args: Any) -> None:
        prepare(llm_args)
        super().__init__(llm_args)


def prepare(llm_args: Any) -> None:
    """Lead this process's connector to its rank's files."""
    state, mapping = fake_connector.state, llm_args.parallel_config.to_mapping()
    directory = Path(os.environ[DIRECTORY_VARIABLE])
    name = "shared" if llm_args.enable_attention_dp else f"blocks-{mapping.rank}"
    if not isinstance(state.calls, Journal):
        state.calls = Journal(journal_path(directory, mapping.rank))
    state.store = Blocks(directory / name)
    failing = directory / f"fail-{mapping.rank}"
    state.raise_in = failing.read_text() if failing.exists() else ""


def journal_path(directory: Path, rank: int) -> Path:
    return directory / f"calls-{rank}"
