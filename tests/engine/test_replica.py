"""An engine in its own process answers as one in this process and never outlives its parent."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from kvray.errors import ConfigError, KVRayError
from kvray.reference.child_process import JsonPipe, PipeClosed
from kvray.reference.replica import Replica
from tests.engine.conftest import BLOCK, make_prompt
from tests.waiting import wait_for

OPTIONS = {"model": "tiny", "tokens_per_block": BLOCK, "num_blocks": 64}
DEADLINE_S = 20.0


def test_replica_answers_bit_for_bit_like_this_process(expected, tmp_path):
    prompts = [make_prompt(100), make_prompt(40, seed=1)]
    log_path = tmp_path / "log"
    with Replica.start("one", log_path=log_path, **OPTIONS) as replica:
        outputs = replica.generate(prompts, max_tokens=20)
        assert [output.token_ids for output in outputs] == [expected(p, 20) for p in prompts]
        assert replica.generate(prompts[0], max_tokens=20).reused_tokens == 96
        assert replica.generate("text", max_tokens=2).prompt_tokens == 4
        with pytest.raises(ConfigError, match=r"Replica one: .*no token id"):
            replica.generate([-1])
        assert replica.is_alive
    assert not replica.is_alive
    replica.close()
    with pytest.raises(KVRayError, match="closed"):
        replica.generate([1])


def test_tokens_are_heard_of_as_they_come_and_calls_are_in_flight_at_once(expected):
    heard: list[int] = []
    first = threading.Event()

    def listen(tokens: list[int]) -> None:
        heard.extend(tokens)
        first.set()

    with Replica.start("four", **OPTIONS) as replica:
        long = replica.submit(make_prompt(20), max_tokens=700, listener=listen)
        assert first.wait(DEADLINE_S)
        prompt = make_prompt(40, seed=1)
        assert replica.generate(prompt, max_tokens=20).token_ids == expected(prompt, 20)
        assert not long.future.done()
        replica.cancel(long)
        output = long.future.result(DEADLINE_S)
        assert output.finish_reason == "cancelled"
        assert tuple(heard) == output.token_ids
        assert len(heard) < 700
        replica.cancel(long)  # which has ended
        with pytest.raises(ConfigError, match="max_tokens is 0"):
            replica.submit(prompt, max_tokens=0).future.result(DEADLINE_S)


def test_a_call_that_is_late_is_given_up():
    with Replica.start("five", **OPTIONS) as replica:
        with pytest.raises(KVRayError, match=r"Replica five: .*has not ended within 0 s"):
            replica.generate(make_prompt(10), max_tokens=900, timeout_s=0.2)
        assert replica.is_alive
        assert replica.generate(make_prompt(10), max_tokens=2).finish_reason == "length"


def test_error_of_the_start_is_the_childs_own_sentence():
    with pytest.raises(ConfigError, match="Replica bad: There is no model at /none"):
        Replica.start("bad", **{**OPTIONS, "model": "/none"})


def test_crash_is_told_with_the_exit_status():
    with Replica.start("two", **OPTIONS) as replica:
        os.kill(replica.pid, signal.SIGKILL)
        with pytest.raises(KVRayError, match=r"Replica two is gone.*-9"):
            replica.generate([1, 2])


def test_closing_ends_a_call_of_another_thread():
    replica = Replica.start("three", **OPTIONS)
    errors: list[Exception] = []

    def call() -> None:
        try:
            replica.generate(make_prompt(10), max_tokens=1000)
        except KVRayError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.2)
    replica.close()
    thread.join(DEADLINE_S)
    assert len(errors) == 1


@pytest.mark.parametrize("is_thread", [False, True], ids=["main", "thread"])
def test_replica_ends_with_its_parent(is_thread):
    code = f"""
import threading, time
from kvray.reference.replica import Replica
def start():
    replica = Replica.start("orphan", **{OPTIONS!r})
    print(replica.pid, flush=True)
    kept.append(replica)
kept = []
thread = threading.Thread(target=start)
thread.start() if {is_thread} else start()
{"thread.join()" if is_thread else ""}
time.sleep(0.3)
assert kept[0].is_alive
print(kept[0].generate([1, 2], max_tokens=1).prompt_tokens, flush=True)
kept[0].generate([1, 2], max_tokens=900)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
        assert parent.stdout.readline() == "2\n"
        parent.kill()
        parent.wait(DEADLINE_S)
    wait_for(lambda: not psutil.pid_exists(pid))


def test_pipe_bounds_time_and_length(monkeypatch):
    near_read, far_write = os.pipe()
    far_read, near_write = os.pipe()
    near, far = JsonPipe(near_read, near_write), JsonPipe(far_read, far_write)
    near.send({"text": "x" * 1000}, timeout_s=1)
    assert far.receive(timeout_s=1) == {"text": "x" * 1000}
    with pytest.raises(PipeClosed, match="in time"):
        far.receive(timeout_s=0.01)
    monkeypatch.setattr("kvray.reference.child_process.MESSAGE_BYTES_MAX", 100)
    with pytest.raises(ConfigError, match="longer"):
        near.send({"text": "x" * 1000}, timeout_s=1)
    os.write(near_write, b"y" * 200)
    with pytest.raises(PipeClosed, match="more than 100"):
        far.receive(timeout_s=1)
    near.close()
    near.close()
    far.close()


NEEDLESS = {
    "driving replicas needs neither torch nor ray": (
        "import sys, kvray.reference as r; r.Replica; r.Output;"
        "print([m for m in ('torch', 'transformers', 'ray') if m in sys.modules])",
        "[]",
    ),
    "an engine needs no ray": (
        "import os, sys; from kvray.reference import ReferenceEngine;"
        "ReferenceEngine('tiny', num_blocks=8).generate('hi', max_tokens=1);"
        "print('ray' in sys.modules); sys.stdout.flush(); os._exit(0)",
        "False",
    ),
}


@pytest.mark.parametrize(("code", "said"), NEEDLESS.values(), ids=NEEDLESS)
def test_what_is_not_needed_is_not_imported(code, said):
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{said}\n"
