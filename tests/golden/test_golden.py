"""Runs give the numbers that they gave: bit by bit on the processor that made the record."""

import json

import pytest

from golden import names
from golden.runs import RECORD, RUNS, processor, run

KNOWN = json.loads(RECORD.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_gives_what_it_gave(name):
    found, known = run(name), KNOWN["runs"][name]
    for key in ("loss", "train_loss", "accuracy"):
        assert found[key] == pytest.approx(known[key], rel=1e-7, abs=1e-9)
    if processor() == KNOWN["processor"]:
        assert found == known


def test_the_record_has_all_runs():
    assert set(KNOWN["runs"]) == set(RUNS)


def test_public_names_are_those_of_the_record():
    assert names.collect() == json.loads(names.RECORD.read_text(encoding="utf-8"))
