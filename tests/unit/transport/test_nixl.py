"""NIXL between two processes, over TCP: what each transport must do, and what only it does."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvray.errors import TransferError, TransferTimeout
from kvray.transport.nixl import NixlTransport, choose_wires, rdma_drivers
from kvray.transport.transport import Array
from tests import conformance
from tests.conformance import MEMORY_BYTES, TRANSPORT_BEHAVIOURS, check_transport, pattern
from tests.far import Far

# Before the first agent of this process, which reads it; both processes are on one machine.
os.environ.setdefault("UCX_TLS", "tcp")

ROOT = Path(__file__).parents[3]
MARGIN_S = 1.0


class NixlSource:
    """The far process: sends from a memory of known content."""

    def __init__(self) -> None:
        self._transport = NixlTransport(pattern())

    def address(self) -> bytes:
        return self._transport.address

    def send(
        self, address: bytes, sources: Array, targets: Array, sizes: Array, timeout_s: float
    ) -> Any:
        return self._transport.send(address, sources, targets, sizes, timeout_s=timeout_s)


class NixlCouple:
    """See `tests.conformance.Couple`."""

    def __init__(self, far: Far) -> None:
        self.memory = np.zeros(MEMORY_BYTES, dtype=np.uint8)
        self.target = NixlTransport(self.memory)
        self.far = far
        self.pid, self.kill = far.process.pid, far.kill

    def send(self, *what: Any, timeout_s: float) -> Any:
        return self.far.call("send", *what, timeout_s, timeout_s=timeout_s + MARGIN_S)


@pytest.fixture(scope="module")
def source() -> Iterator[Far]:
    """The far process: to start one takes a second of CPU."""
    far = Far("tests.unit.transport.test_nixl:NixlSource")
    yield far
    far.kill()


@pytest.fixture
def couple(source: Far) -> Iterator[NixlCouple]:
    """A couple with the far process of all tests, which goes on as it is."""
    made = NixlCouple(source)
    yield made
    made.target.close()


@pytest.fixture
def fragile() -> Iterator[NixlCouple]:
    """A couple with a far process of its own, which may be stopped or killed."""
    made = NixlCouple(Far("tests.unit.transport.test_nixl:NixlSource"))
    yield made
    made.target.close()
    made.far.kill()


WITHOUT = """
import sys
for name in ("nixl", "nixl_cu12", "nixl_cu13"):
    sys.modules[name] = None
import numpy as np
from kvray.errors import TransportUnavailable
from kvray.transport import open_transports
opened, missing = open_transports(("nixl",), np.zeros(4096, dtype=np.uint8))
print(opened, missing["nixl"])
"""

AGENT = """
import numpy as np
from kvray.transport.nixl import NixlTransport
NixlTransport(np.zeros(4096, dtype=np.uint8)).close()
print("closed")
"""


def run_python(code: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, **options)


STOPPING = (
    conformance.tells_of_a_dead_source,
    conformance.ends_by_its_deadline_with_a_frozen_source,
    conformance.writes_nothing_late_once_it_was_renewed,
)


@pytest.mark.parametrize(
    "behaviour",
    [one for one in TRANSPORT_BEHAVIOURS if one not in STOPPING],
    ids=lambda one: one.__name__,
)
def test_nixl(behaviour, couple):
    check_transport(behaviour, couple)


@pytest.mark.parametrize("behaviour", STOPPING, ids=lambda one: one.__name__)
def test_nixl_with_a_source_that_stops(behaviour, fragile):
    check_transport(behaviour, fragile)


def test_push_to_a_frozen_target_ends_by_its_deadline(fragile):
    # The other way round: the far process is the target of this one's pushes.
    address = fragile.far.call("address", timeout_s=10)
    one, many = (np.zeros(count, dtype=np.int64) for count in (1, 8))  # more than sockets hold
    fragile.target.send(address, one, one, one + 4096, timeout_s=10)
    fragile.far.freeze()
    with pytest.raises(TransferTimeout, match="did not end in time"):
        fragile.target.send(address, many, many, many + MEMORY_BYTES, timeout_s=0.5)
    fragile.far.wake()
    fragile.target.send(address, one, one, one + 4096, timeout_s=10)


def test_a_piece_of_nothing_does_not_arrive_at_a_dead_target(fragile):
    address = fragile.far.call("address", timeout_s=10)
    none = np.zeros(0, dtype=np.int64)
    fragile.target.send(address, none, none, none, timeout_s=10)
    fragile.kill()
    with pytest.raises(TransferError):
        fragile.target.send(address, none, none, none, timeout_s=1)


def test_agent_that_waits_uses_no_core(couple):
    one = np.zeros(1, dtype=np.int64)
    couple.send(couple.target.address, one, one, one + 4096, timeout_s=10)
    before = sum(os.times()[:2])
    time.sleep(1.0)
    assert sum(os.times()[:2]) - before < 0.5


def test_node_without_nixl_says_what_to_install():
    done = run_python(WITHOUT)
    assert done.stdout.startswith("{} NIXL is not installed; run `pip install"), done.stderr


TCP, RDMA, NO_EFA = {"UCX_TLS": "tcp"}, {"UCX_TLS": "^shm"}, {"UCX_MODULES": "^efa"}
GIVEN = {"UCX_TLS": "rc,tcp", "UCX_MODULES": "ib"}


@pytest.mark.parametrize(
    ("given", "drivers", "chosen"),
    [
        pytest.param({}, [], TCP | NO_EFA, id="tcp where there is no RDMA"),
        pytest.param({}, ["mlx5_core"], RDMA | NO_EFA, id="no EFA module without a device"),
        pytest.param({}, ["mlx5_core", "efa"], RDMA, id="all modules with one"),
        pytest.param(GIVEN, [], GIVEN, id="what the environment says of UCX stands"),
    ],
)
def test_wires_and_modules_of_ucx_are_those_that_the_devices_need(given, drivers, chosen):
    environ = dict(given)
    choose_wires(environ, drivers)
    assert environ == chosen


def test_drivers_of_rdma_devices_are_read_from_the_kernel(tmp_path):
    assert rdma_drivers(tmp_path / "none") == []
    driver = tmp_path / "drivers" / "efa"
    driver.mkdir(parents=True)
    (tmp_path / "devices" / "rdmap0s6" / "device").mkdir(parents=True)
    (tmp_path / "devices" / "rdmap0s6" / "device" / "driver").symlink_to(driver)
    assert rdma_drivers(tmp_path / "devices") == ["efa"]


def test_process_that_made_an_agent_ends_cleanly() -> None:
    # It ended with SIGSEGV where Debian's libibverbs1 and ibverbs-providers are; `.ci/run` runs
    # this with and without them.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    done = run_python(AGENT, env=environ)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
