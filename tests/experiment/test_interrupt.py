"""Ctrl-C is never lost, whatever Python is doing when it comes."""

import os
import signal

import pytest

from fednorm.cli.terminal import catch_interrupts
from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.run import Monitor
from fednorm.experiment.schema.load import build_experiment

SMALL = {"strategies": ["fbn", "gn"], "seeds": 1, "rounds": 4, "clients": 2}


class Destroyed:
    """Python ignores exceptions in destructors, KeyboardInterrupt among them."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(1000))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_ctrl_c_waits_for_the_end_of_the_round(workers, tmp_path, capsys):
    seen = []

    def press(event):
        seen.append(event.round)
        if event.round == 2 and seen.count(2) == 1:
            thing = Destroyed()
            del thing

    rounds = 4 if workers == 1 else 100_000
    experiment = build_experiment({**SMALL, "rounds": rounds})
    with catch_interrupts() as stop:
        found = run_comparison(
            experiment, folder=tmp_path, monitor=Monitor([press], stop), workers=workers
        )
        assert stop.is_set()
    assert {run.status for run in found.runs} == {"interrupted"}
    assert "Stopping after this round" in capsys.readouterr().err
    if workers == 1:
        assert seen == [1, 2]
        assert [run.rounds for run in found.runs] == [2]
    for run in found.runs:
        (folder,) = tmp_path.glob(f"runs/{run.strategy}-*")
        assert list(folder.glob(f"checkpoint-{run.rounds:08}-*"))


def test_the_second_ctrl_c_interrupts_at_once():
    with catch_interrupts():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_handler_is_put_back():
    before = signal.getsignal(signal.SIGINT)
    with catch_interrupts():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
