"""An engine in its own process answers as one in this process and never outlives its parent."""

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvray.errors import ConfigError, KVRayError
from kvray.reference.child_process import Pipe, PipeClosed
from kvray.reference.replica import Replica
from tests.engine.conftest import BLOCK, make_prompt, wait_for_the_end_of_its_child
from tests.waiting import wait_for

DEADLINE_S = 20.0
STUB = "tests.engine.stub_engine"


def start_stub(name: str, **options: Any) -> Replica:
    """Start an engine without a model, which starts soon."""
    return Replica.start(name, module=STUB, **options)


def test_replica_answers_bit_for_bit_like_this_process(expected, tmp_path):
    prompts = [make_prompt(100), make_prompt(40, seed=1)]
    options = {"model": "tiny", "tokens_per_block": BLOCK, "num_blocks": 64}
    with Replica.start("one", log_path=tmp_path / "log", **options) as replica:
        outputs = replica.generate(prompts, max_tokens=20)
        assert [output.token_ids for output in outputs] == [expected(p, 20) for p in prompts]
        assert replica.generate(prompts[0], max_tokens=20).reused_tokens == 96
        assert replica.generate("text", max_tokens=2).prompt_tokens == 4
        with pytest.raises(ConfigError, match=r"Replica one failed: .*no token id"):
            replica.generate([-1])
        assert replica.is_alive
    assert not replica.is_alive
    replica.close()
    with pytest.raises(KVRayError, match="closed"):
        replica.generate([1])


def test_a_call_that_is_late_is_given_up():
    with start_stub("five") as replica:
        with pytest.raises(KVRayError, match=r"Replica five failed: .*has not ended within 0 s"):
            replica.generate([1], max_tokens=10**6, timeout_s=0.2)
        assert replica.is_alive
        assert replica.generate([1], max_tokens=2).finish_reason == "length"


def test_error_of_the_start_is_the_childs_own_sentence():
    with pytest.raises(ConfigError, match="Replica bad failed: There is no model"):
        start_stub("bad", sentence="There is no model.")


def test_crash_is_told_with_the_exit_status():
    with start_stub("two") as replica:
        os.kill(replica.pid, signal.SIGKILL)
        with pytest.raises(KVRayError, match=r"Replica two was killed by SIGKILL"):
            replica.generate([1, 2])


def test_closing_ends_a_call_of_another_thread():
    with start_stub("three") as replica, ThreadPoolExecutor(1) as threads:
        call = threads.submit(replica.generate, [1], max_tokens=10**6)
        wait_for(replica._turn.locked)
        replica.close()
        assert isinstance(call.exception(DEADLINE_S), KVRayError)


@pytest.mark.parametrize("is_thread", [False, True], ids=["main", "thread"])
def test_replica_ends_with_its_parent(is_thread):
    code = f"""
import threading
from kvray.reference.replica import Replica
kept = []
def start():
    kept.append(Replica.start("orphan", module={STUB!r}))
thread = threading.Thread(target=start)
thread.start() if {is_thread} else start()
{"thread.join()" if is_thread else ""}
print(kept[0].pid, kept[0].generate([1, 2], max_tokens=1).prompt_tokens, flush=True)
kept[0].generate([1], max_tokens=10**6)
"""
    assert wait_for_the_end_of_its_child(code)[1] == 2


@pytest.mark.parametrize("is_thread", [False, True], ids=["main", "thread"])
def test_a_child_that_looks_at_no_pipe_ends_with_its_parent(tmp_path, is_thread):
    (tmp_path / "hanging.py").write_text(
        "import time; from kvray.reference.child_process import join_parent\n"
        "pipe = join_parent(); pipe.send(1, timeout_s=60); time.sleep(3600)"
    )
    code = f"""
import sys, threading, time
from kvray.reference.child_process import Child
def start():
    child = Child("it", "hanging", output=2, env={{"PYTHONPATH": {str(tmp_path)!r}}})
    child.receive(timeout_s=60)
    print(child.process.pid, flush=True)
    time.sleep(3600)
threading.Thread(target=start).start() if {is_thread} else start()
"""
    wait_for_the_end_of_its_child(code)


def test_pipe_bounds_time_and_length(monkeypatch):
    near, far = map(Pipe, socket.socketpair())
    near.send({"text": "x" * 1000}, timeout_s=1)
    assert far.receive(timeout_s=1) == {"text": "x" * 1000}
    with pytest.raises(PipeClosed, match="in time"):
        far.receive(timeout_s=0.01)
    monkeypatch.setattr("kvray.reference.child_process.MESSAGE_BYTES_MAX", 100)
    with pytest.raises(ConfigError, match="longer"):
        near.send({"text": "x" * 1000}, timeout_s=1)
    near._end.sendall((200).to_bytes(8, "little"))
    with pytest.raises(PipeClosed, match="more than 100"):
        far.receive(timeout_s=1)
    near.close()
    near.close()
    far.close()


def test_driving_replicas_needs_neither_torch_nor_ray():
    code = (
        "import sys, kvray.reference as r; r.Replica; r.Output;"
        "print([m for m in ('torch', 'transformers', 'ray') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
