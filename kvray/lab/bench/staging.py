"""`kvray bench staging`: blocks fetched from another node, beside the bare transports."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from kvray.errors import KVRayError
from kvray.lab.bench.report import Report, Row, copy_row, cores, cpu_row
from kvray.lab.bench.runner import Duration, Pair, Runner
from kvray.lab.bench.staging_driver import BLOCK_BYTES
from kvray.lab.chaos.machine import Machine

NUM_BLOCKS, REPEAT = 256, 9
_LEAST_RATIO = 0.9
_TIMEOUT_S = 900.0
_DRIVER = "kvray.lab.bench.staging_driver"


def measure_staging(*, num_blocks: int, repeat: int, runner: Runner) -> Report:
    """Start two nodes, and fetch blocks from one to the other.

    Raises:
        KVRayError: Ray did not start, a transport is missing, or blocks did not come.
    """
    runner.show("Starting two nodes", total=2)
    with runner.interrupts.held():
        machine = Machine(num_nodes=2)
        runner.stack.callback(machine.close)
    runner.advance()
    runner.show("Measuring")
    path = machine.write_config({}, cluster_name="bench")
    with runner.interrupts.held():
        driver = subprocess.Popen(
            [sys.executable, "-m", _DRIVER, str(path), str(num_blocks), str(repeat)],
            env=machine.environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, which ends it
        )
        runner.stack.callback(_end, driver)
    try:
        output, errors = driver.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise KVRayError("The bench did not end in time; run it on an idle machine.") from None
    pairs = _pairs_of(output, errors)
    return Report(
        rows=_rows(pairs, num_blocks * BLOCK_BYTES),
        note=f"{num_blocks} blocks of 4 MiB between two nodes of this machine, over its loopback"
        f" device, {len(pairs['nixl'])} pairs on {cores()}.",
        facts={
            "blocks": num_blocks,
            "block_bytes": BLOCK_BYTES,
            "pairs": len(pairs["nixl"]),
        },
    )


def _pairs_of(output: str, errors: str) -> dict[str, list[Pair]]:
    """Return the pairs that the driver printed last, by measurement.

    Raises:
        KVRayError: it printed why there are none, or it died.
    """
    lines = output.strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        raise KVRayError(f"The bench's nodes failed: {' '.join(errors.split()[-60:])}")
    found = json.loads(lines[-1])
    if "error" in found:
        raise KVRayError(found["error"])
    return {
        name: [
            Pair(ours=Duration(**pair["ours"]), floor=Duration(**pair["floor"])) for pair in pairs
        ]
        for name, pairs in found.items()
    }


def _rows(pairs: Mapping[str, Sequence[Pair]], num_bytes: int) -> list[Row]:
    def row(
        title: str, kind: str, names: tuple[str, str, str], least: float | None = _LEAST_RATIO
    ) -> Row:
        return copy_row(title, names, pairs[kind], num_bytes=num_bytes, least=least)

    def cpu(kind: str, names: tuple[str, str]) -> Row:
        return cpu_row("    CPU time, both sides", names, pairs[kind], num_bytes=num_bytes)

    speed = "staging_nixl_gb_per_s"
    return [
        row(
            "staging over nixl, bare NIXL push",
            "nixl",
            ("staging_nixl_ratio", speed, "raw_nixl_gb_per_s"),
        ),
        row(
            "    one push of kvray's transport",
            "transport",
            ("staging_nixl_transport_ratio", speed, "transport_gb_per_s"),
        ),
        row(
            "    bare socket",
            "socket",
            ("staging_nixl_socket_ratio", speed, "raw_socket_gb_per_s"),
            least=None,
        ),
        cpu("nixl", ("staging_cpu_s_per_gb", "raw_nixl_cpu_s_per_gb")),
        row(
            "staging over object_ref, bare Ray objects",
            "object_ref",
            ("staging_object_ref_ratio", "staging_object_ref_gb_per_s", "raw_ray_gb_per_s"),
        ),
        cpu("object_ref", ("staging_object_ref_cpu_s_per_gb", "raw_ray_cpu_s_per_gb")),
    ]


def _end(driver: subprocess.Popen[str]) -> None:
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    for stream in (driver.stdout, driver.stderr):
        if stream is not None:
            stream.close()
