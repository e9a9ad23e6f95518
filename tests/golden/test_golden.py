"""Runs give the numbers that they gave: bit by bit on processors of the record."""

import json

import pytest

from golden import names
from golden.runs import NUMBERS, RECORD, RUNS, bits, processor, run

KNOWN = json.loads(RECORD.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_gives_what_it_gave(name):
    found, known = run(name), KNOWN["runs"][name]
    for key in NUMBERS:
        assert found[key] == pytest.approx(known[key], rel=1e-7, abs=1e-9)
    if recorded := KNOWN["bits"].get(processor()):
        assert bits(found) == recorded[name]


def test_the_record_has_all_runs():
    assert set(KNOWN["runs"]) == set(RUNS)


def test_public_names_are_those_of_the_record():
    assert names.collect() == json.loads(names.RECORD.read_text(encoding="utf-8"))
