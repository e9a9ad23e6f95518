"""Memory is kept where that was asked for, and nowhere else."""

import platform
import resource

import pytest
import torch

from fednorm.engines.worker_process import prepare_context
from fednorm.system import keep_memory


def _count_faults(wire, *, keep):
    torch.set_num_threads(1)
    done = keep and keep_memory()
    faults = []
    for _ in range(10):  # small values between the large ones move these for a few turns
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        (torch.ones(10_000_000) + 1).sum()  # 40 MB, twice
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    wire.send((done, min(faults)))  # a system that is short of memory takes some back at times


def count_faults(*, keep):
    """Return whether a new process keeps memory, and for how many pages it asks again."""
    context = prepare_context()
    ours, theirs = context.Pipe()
    process = context.Process(target=_count_faults, args=(theirs,), kwargs={"keep": keep})
    process.start()
    found = ours.recv()
    process.join()
    return found


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of the GNU C library")
def test_kept_memory_is_not_asked_for_again():
    _, plain = count_faults(keep=False)
    done, kept = count_faults(keep=True)
    assert done
    assert plain > 10_000  # pages
    assert kept < 1000


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("FEDNORM_ALLOCATOR", "off")
    assert not keep_memory()
