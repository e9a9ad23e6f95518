"""fednorm works without Flower, and says what to install where it is needed."""

import subprocess
import sys

CODE = """
import sys

sys.modules["flwr"] = None
import fednorm
import fednorm.cli

print(fednorm.simulate("gn", rounds=1, clients=2).rounds)


def use_flower():
    import fednorm.flower


def choose_flower():
    fednorm.simulate("gn", rounds=1, clients=2, engine="flower")


for call in (use_flower, choose_flower):
    try:
        call()
    except Exception as error:
        print(error)
"""


def test_fednorm_works_without_flower_and_tells_what_is_missing():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    rounds, *told = done.stdout.splitlines()
    assert rounds == "1"
    assert sum('pip install ".[flower]"' in line for line in told) == 2
