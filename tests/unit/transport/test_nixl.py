import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvray.errors import TransferError, TransferTimeout
from kvray.transport.nixl import choose_wires, rdma_drivers
from tests import conformance
from tests.conformance import MEMORY_BYTES, TRANSPORT_BEHAVIOURS, check_transport
from tests.unit.transport.conftest import NixlCouple

ROOT = Path(__file__).parents[3]

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


def run_python(code: str, environ: "dict[str, str] | None") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )


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


def test_push_to_a_frozen_target_ends_by_its_deadline(fragile: NixlCouple) -> None:
    # The other way round: the far process is the target of this one's pushes.
    address = fragile.far.call("address", timeout_s=10)
    one = np.zeros(1, dtype=np.int64)
    fragile.target.send(address, one, one, one + 4096, timeout_s=10)
    fragile.far.freeze()
    with pytest.raises(TransferTimeout, match="did not end in time"):
        fragile.target.send(address, one, one, one + MEMORY_BYTES, timeout_s=0.5)
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
    couple.far.process.poll()
    for _ in range(20):
        couple.far.call("pause", 0.05, timeout_s=10)
    assert sum(os.times()[:2]) - before < 0.5


def test_node_without_nixl_says_what_to_install():
    done = run_python(WITHOUT, None)
    assert done.stdout.startswith("{} NIXL is not installed; run `pip install"), done.stderr


ALL_WIRES, NO_EFA = {"UCX_TLS": "tcp"}, {"UCX_MODULES": "^efa"}
GIVEN = {"UCX_TLS": "rc,tcp", "UCX_MODULES": "ib"}


@pytest.mark.parametrize(
    ("given", "drivers", "chosen"),
    [
        pytest.param({}, [], ALL_WIRES | NO_EFA, id="tcp where there is no RDMA"),
        pytest.param({}, ["mlx5_core"], NO_EFA, id="no EFA module without a device"),
        pytest.param({}, ["mlx5_core", "efa"], {}, id="all modules with one"),
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
    done = run_python(AGENT, environ)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
