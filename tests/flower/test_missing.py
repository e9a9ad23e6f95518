"""fednorm works without Flower, and says what to install where it is needed."""

import subprocess
import sys

WITHOUT = "import sys; sys.modules['flwr'] = None\n"


def told(code):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr


def test_fednorm_works_without_flower():
    code = "import fednorm, fednorm.cli; print(fednorm.simulate('gn', rounds=1, clients=2).rounds)"
    assert told(code)[0] == 0


def test_what_is_missing_is_told():
    assert 'pip install "fednorm[flower]"' in told("import fednorm.flower")[1]
    code = "import fednorm; fednorm.simulate('gn', rounds=1, clients=2, engine='flower')"
    assert 'pip install "fednorm[flower]"' in told(code)[1]
