"""`kvray bench staging`: blocks fetched from another node, beside the bare transports."""

from __future__ import annotations

import json
import subprocess
import sys

from kvray.errors import KVRayError
from kvray.lab.bench.report import Report, copy_row, cores, cpu_row
from kvray.lab.bench.runner import Duration, Pair, Runner
from kvray.lab.bench.staging_driver import BLOCK_BYTES
from kvray.lab.chaos.machine import Machine

_TIMEOUT_S = 900.0
_SPEED = "staging_nixl_gb_per_s"
_COPIES = {
    "nixl": (
        "staging over nixl, bare NIXL push",
        ("staging_nixl_ratio", _SPEED, "raw_nixl_gb_per_s"),
    ),
    "transport": (
        "    one push of kvray's transport",
        ("staging_nixl_transport_ratio", _SPEED, "transport_gb_per_s"),
    ),
    "socket": ("    bare socket", ("staging_nixl_socket_ratio", _SPEED, "raw_socket_gb_per_s")),
    "object_ref": (
        "staging over object_ref, bare Ray objects",
        ("staging_object_ref_ratio", "staging_object_ref_gb_per_s", "raw_ray_gb_per_s"),
    ),
}
"""For each pair of the driver: the row's title, and the names of ratio, speed and bare speed."""


def run(runner: Runner, *, repeat: int | None, quick: bool) -> Report:
    """Start two nodes, and fetch blocks from one to the other.

    Raises:
        KVRayError: Ray did not start, a transport is missing, or blocks did not come.
    """
    num_blocks, num_pairs = 256, repeat or 9
    if quick:
        num_blocks, num_pairs = 32, min(num_pairs, 3)
    runner.show("Starting two nodes", total=2)
    with runner.interrupts.held():
        machine = Machine(num_nodes=2)
        runner.stack.callback(machine.close)
    runner.advance()
    runner.show("Measuring")
    path = machine.write_config({}, cluster_name="bench")
    arguments = [str(path), str(num_blocks), str(num_pairs)]
    with runner.interrupts.held():
        driver = subprocess.Popen(
            [sys.executable, "-m", "kvray.lab.bench.staging_driver", *arguments],
            env=machine.environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, which ends it
        )
        runner.stack.enter_context(driver)  # which closes its pipes and waits for it
        runner.stack.callback(driver.kill)
    try:
        output, errors = driver.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise KVRayError("The bench did not end in time; run it on an idle machine.") from None
    pairs, num_bytes = _pairs_of(output, errors), num_blocks * BLOCK_BYTES
    nixl, transport, socket, object_ref = (
        copy_row(title, names, pairs[name], num_bytes=num_bytes)
        for name, (title, names) in _COPIES.items()
    )
    nixl_cpu, object_ref_cpu = (
        cpu_row("    CPU time, both sides", names, pairs[name], num_bytes=num_bytes)
        for name, names in (
            ("nixl", ("staging_cpu_s_per_gb", "raw_nixl_cpu_s_per_gb")),
            ("object_ref", ("staging_object_ref_cpu_s_per_gb", "raw_ray_cpu_s_per_gb")),
        )
    )
    return Report(
        rows=[nixl, transport, socket, nixl_cpu, object_ref, object_ref_cpu],
        note=f"{num_blocks} blocks of 4 MiB between two nodes of this machine, over its loopback"
        f" device, {num_pairs} pairs on {cores()}.",
        facts={"blocks": num_blocks, "block_bytes": BLOCK_BYTES, "pairs": num_pairs},
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
        name: [Pair(Duration(*ours), Duration(*floor)) for ours, floor in pairs]
        for name, pairs in found.items()
    }
