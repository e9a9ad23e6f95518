"""Memory is kept where that was asked for, and nowhere else."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    from fednorm.system import keep_memory
    print(keep_memory())
faults = []
for number in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    (torch.ones(25_000_000) + 1).sum()  # 100 MB, twice
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults))  # a system that is short of memory takes some back at times
"""


def call(mode, **environment):
    command = [sys.executable, "-c", FAULTS, mode]
    result = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return result.stdout.split()


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of the GNU C library")
def test_kept_memory_is_not_asked_for_again():
    (plain,) = call("plain")
    done, kept = call("keep")
    assert done == "True"
    assert int(plain) > 10_000  # pages
    assert int(kept) < 1000


@pytest.mark.slow
def test_it_can_be_switched_off():
    assert call("keep", FEDNORM_ALLOCATOR="off")[0] == "False"
