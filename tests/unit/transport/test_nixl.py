import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvray.errors import TransferError, TransferTimeout
from kvray.transport.nixl import choose_wires, has_rdma
from tests.conformance import MEMORY_BYTES, TRANSPORT_BEHAVIOURS, Couple, check_transport
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


@pytest.mark.parametrize("behaviour", TRANSPORT_BEHAVIOURS, ids=lambda one: one.__name__)
def test_nixl(behaviour: Callable[[Couple], None], couple: NixlCouple) -> None:
    check_transport(behaviour, couple)


def test_push_to_a_frozen_target_ends_by_its_deadline(couple: NixlCouple) -> None:
    # The other way round: the far process is the target of this one's pushes.
    address = couple.far.call("address", timeout_s=10)
    one = np.zeros(1, dtype=np.int64)
    couple.target.send(address, one, one, one + 4096, timeout_s=10)
    couple.far.freeze()
    with pytest.raises(TransferTimeout, match="did not end in time"):
        couple.target.send(address, one, one, one + MEMORY_BYTES, timeout_s=0.5)
    couple.far.wake()
    couple.target.send(address, one, one, one + 4096, timeout_s=10)


def test_a_piece_of_nothing_connects_and_writes_nothing(couple: NixlCouple) -> None:
    none = np.zeros(0, dtype=np.int64)
    couple.memory[:] = 7
    couple.send(couple.target.address, none, none, none, timeout_s=10)
    assert (couple.memory == 7).all()


def test_a_piece_of_nothing_does_not_arrive_at_a_dead_target(couple: NixlCouple) -> None:
    address = couple.far.call("address", timeout_s=10)
    none = np.zeros(0, dtype=np.int64)
    couple.target.send(address, none, none, none, timeout_s=10)
    couple.kill()
    with pytest.raises(TransferError):
        couple.target.send(address, none, none, none, timeout_s=1)


def test_agent_that_waits_uses_no_core(couple: NixlCouple) -> None:
    one = np.zeros(1, dtype=np.int64)
    couple.send(couple.target.address, one, one, one + 4096, timeout_s=10)
    before = sum(os.times()[:2])
    couple.far.process.poll()
    for _ in range(20):
        couple.far.call("pause", 0.05, timeout_s=10)
    assert sum(os.times()[:2]) - before < 0.5


def test_node_without_nixl_says_what_to_install() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("{} NIXL is not installed; run `pip install"), done.stderr


def test_wires_are_tcp_unless_somebody_knows_better() -> None:
    if has_rdma():
        pytest.skip("this machine has an RDMA device")
    environ: dict[str, str] = {}
    choose_wires(environ)
    assert environ == {"UCX_TLS": "tcp"}
    chosen = {"UCX_TLS": "rc,tcp"}
    choose_wires(chosen)
    assert chosen == {"UCX_TLS": "rc,tcp"}
