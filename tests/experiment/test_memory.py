"""A comparison that would not fit into memory is refused with the numbers."""

import mmap
from pathlib import Path

import numpy as np
import pytest

from fednorm import system
from fednorm.errors import ConfigError
from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.schema.load import build_experiment
from fednorm.system import MemoryEstimate, measure_peak

GB = 10**9
SMALL = {"strategies": ["fedbn"], "seeds": 1, "rounds": 1, "clients": 4, "batch_size": 8}
linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells")


@linux
def test_the_peak_is_that_of_the_block():
    with measure_peak() as none:
        pass
    with (
        measure_peak() as much,
        mmap.mmap(-1, 320_000_000) as block,
    ):  # not from what the heap still holds
        np.frombuffer(block, np.uint8)[:] = 1
    assert none.bytes < 20_000_000
    assert 250_000_000 < much.bytes < 450_000_000


def test_what_is_too_much_is_told_in_numbers(monkeypatch):
    monkeypatch.setattr(system, "available_memory", lambda: 8 * GB)
    needs = MemoryEstimate(limit=4_000_000_000)
    needs.add(3 * GB, 0)
    needs.add(1 * GB, 2 * GB, GB // 2)
    with pytest.raises(ConfigError, match=r"2 processes at once would need 11.8 GB .* but 8.0 GB"):
        needs.check(2)
    needs.check(1)


@pytest.mark.parametrize("known", [False, True])
def test_where_nothing_is_told_nothing_is_refused(known, monkeypatch):
    monkeypatch.setattr(system, "available_memory", lambda: GB if known else None)
    needs = MemoryEstimate(limit=4_000_000_000)
    needs.add(9 * GB if not known else None, 9 * GB)
    needs.check(1)


@linux
def test_a_run_is_refused_before_it_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(system, "available_memory", lambda: 1000)
    with pytest.raises(ConfigError, match="for what its clients send and keep"):
        run_comparison(build_experiment(SMALL), folder=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_clients_keep_is_counted(monkeypatch):
    seen = []
    monkeypatch.setattr(MemoryEstimate, "check", lambda self, _: seen.append(self.kept))
    for names in (["fbn"], ["fedbn"]):
        run_comparison(build_experiment({**SMALL, "strategies": names, "algorithm": "fedavg"}))
    assert seen[0] == 0
    assert seen[1] % 4 == 0
    assert seen[1] > 4 * 4 * 4 * 64  # γ, β, mean and variance of four clients, at least
