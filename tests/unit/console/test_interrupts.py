import os
import signal
import threading

import pytest

from kvray.console.interrupts import Interrupts, masked

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize("signum", SIGNALS)
def test_signal_is_an_interrupt_and_a_late_one_does_nothing(signum):
    with pytest.raises(KeyboardInterrupt), Interrupts().caught():
        os.kill(os.getpid(), signum)
    with Interrupts().caught():
        pass
    os.kill(os.getpid(), signum)


def test_threads_that_start_while_masked_take_no_signal():
    masks = []
    with masked():
        thread = threading.Thread(target=lambda: masks.append(signal.pthread_sigmask(0, ())))
        thread.start()
    thread.join()
    assert masks == [{*SIGNALS}]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {*SIGNALS}


@pytest.mark.parametrize("is_checked", [False, True])
def test_signal_that_is_held_back_comes_at_a_check_or_at_the_end_of_the_block(is_checked):
    steps = []

    def run(interrupts: Interrupts) -> None:
        with interrupts.caught(), interrupts.held():
            os.kill(os.getpid(), signal.SIGTERM)
            steps.append("after the signal")
            if is_checked:
                interrupts.check()
            steps.append("at the end")

    with pytest.raises(KeyboardInterrupt):
        run(Interrupts())
    assert steps == ["after the signal", "at the end"][: 1 if is_checked else 2]


@pytest.mark.parametrize("num_signals", [0, 1])
def test_signal_does_not_cut_closing_short(num_signals):
    closed = []

    def run(interrupts: Interrupts) -> None:
        with interrupts.caught(), interrupts.closing() as stack:
            stack.callback(closed.append, "opened first")
            stack.callback(os.kill, os.getpid(), signal.SIGTERM)
            for _ in range(num_signals):
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(Interrupts())
    assert closed == ["opened first"]


def test_error_passes_through_closing():
    interrupts = Interrupts()
    with pytest.raises(ZeroDivisionError), interrupts.caught(), interrupts.closing():
        _ = 1 / 0
