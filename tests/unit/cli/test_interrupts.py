import os
import signal

import pytest

from kvray.cli.interrupts import Interrupts

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize("signum", SIGNALS)
def test_signal_is_an_interrupt(signum: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts().caught():
        os.kill(os.getpid(), signum)


def test_handlers_are_given_back() -> None:
    before = [signal.getsignal(signum) for signum in SIGNALS]
    with Interrupts().caught():
        assert [signal.getsignal(signum) for signum in SIGNALS] != before
    assert [signal.getsignal(signum) for signum in SIGNALS] == before


def test_signal_that_is_held_back_comes_at_the_end_of_the_block() -> None:
    steps = []

    def run(interrupts: Interrupts) -> None:
        with interrupts.caught(), interrupts.held():
            os.kill(os.getpid(), signal.SIGTERM)
            steps.append("after the signal")

    with pytest.raises(KeyboardInterrupt):
        run(Interrupts())
    assert steps == ["after the signal"]


def test_signal_that_is_held_back_comes_at_a_check() -> None:
    steps = []

    def run(interrupts: Interrupts) -> None:
        with interrupts.caught(), interrupts.held():
            os.kill(os.getpid(), signal.SIGTERM)
            interrupts.check()
            steps.append("after the check")

    with pytest.raises(KeyboardInterrupt):
        run(Interrupts())
    assert steps == []


@pytest.mark.parametrize("num_signals", [0, 1])
def test_signal_does_not_cut_closing_short(num_signals: int) -> None:
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


def test_error_passes_through_closing() -> None:
    interrupts = Interrupts()
    with pytest.raises(ZeroDivisionError), interrupts.caught(), interrupts.closing():
        _ = 1 / 0
