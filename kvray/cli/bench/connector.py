"""A run of `kvray bench connector`: stage, cases, and everything ended again, however it ends."""

from __future__ import annotations

import logging

from rich.console import Console

from kvray.cli.bench.connector_cases import CASES, metadata_bytes, take
from kvray.cli.bench.connector_engine import BLOCK_STEP
from kvray.cli.bench.connector_report import Found
from kvray.cli.bench.connector_stage import ConnectorStage
from kvray.cli.interrupts import Interrupts
from kvray.cli.progress import counting_progress
from kvray.config import KVRayConfig, format_size
from kvray.errors import ConfigError

NUM_SLOTS = 65_536
"""As many as a default arena of 4 GiB has: the tables, not the blocks, are looked up."""


def measure_connector(
    settings: KVRayConfig,
    *,
    num_requests: int,
    block_bytes: int,
    console: Console,
    interrupts: Interrupts,
) -> Found:
    """Take all cases.

    Args:
        settings: of the tier; the arena is made beside it, under `arena.dir`.
        num_requests: how many requests a usual case has.
        block_bytes: bytes of one rank's part of a block.
        console: where progress is shown.
        interrupts: what ends it early.

    Raises:
        ConfigError: no pool has blocks of that size.
        KVRayError: there is no room, or too little was found again.
    """
    if block_bytes % BLOCK_STEP:
        raise ConfigError(
            f"--block {format_size(block_bytes)} is no multiple of {BLOCK_STEP} bytes; give one."
        )
    # There is no shard, which an engine says; here that is as it should be.
    logging.getLogger("kvray.node").setLevel(logging.ERROR)
    capacity = NUM_SLOTS * block_bytes
    progress = counting_progress(console)
    with interrupts.closing() as stack, progress:
        total = sum(case.count(num_requests) for case in CASES)
        bar = progress.add_task("Starting", total=total)
        stage = ConnectorStage(
            settings,
            capacity=capacity,
            block_bytes=block_bytes,
            stack=stack,
            interrupts=interrupts,
        )
        taken = []
        for case in CASES:
            progress.update(bar, description=f"Measuring {case.title}")
            taken.append(take(case, stage, num_requests, lambda: progress.advance(bar)))
        return Found(
            taken=taken,
            small_metadata=metadata_bytes(stage),
            block_bytes=block_bytes,
            capacity=capacity,
        )
