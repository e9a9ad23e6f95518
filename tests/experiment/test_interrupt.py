"""Ctrl-C is never lost, whatever Python is doing when it comes."""

import os
import signal

import pytest

from fednorm.experiment.interrupt import between_rounds
from fednorm.experiment.run import Event

EVENT = Event("fbn", 0, 1, 0.5)


class Destroyed:
    """Python ignores exceptions in destructors, KeyboardInterrupt among them."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(1000))


def test_the_first_ctrl_c_waits_for_the_end_of_the_round(capsys):
    seen = []
    with between_rounds(seen.append) as on_round:
        on_round(EVENT)
        thing = Destroyed()
        del thing
        with pytest.raises(KeyboardInterrupt):
            on_round(EVENT)
    assert seen == [EVENT, EVENT]
    assert "Stopping after this round" in capsys.readouterr().err


def test_the_second_ctrl_c_interrupts_at_once():
    with between_rounds(lambda _: None):
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_handler_is_put_back():
    before = signal.getsignal(signal.SIGINT)
    with between_rounds(lambda _: None):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
