"""Commands that only tell something answer without importing torch."""

import os
import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "matplotlib", "flwr", "pandas", "PIL", "safetensors")
CALL = """
import sys
from fednorm.cli import app
sys.argv = ["fednorm", *sys.argv[1:]]
try:
    app()
except SystemExit as end:
    assert end.code in (0, None), end.code
finally:
    print("imported:", *(name for name in {heavy!r} if name in sys.modules), file=sys.stderr)
"""
NO_DETECTION = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}


def run(code, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        # The shell that runs the tests, if there is one, need not be bash.
        env={**os.environ, "COLUMNS": "120", **NO_DETECTION, **environment},
        check=True,
    )
    return done.stdout, done.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("--help", "reproduce"),
        ("--version", "fednorm"),
        ("list", "deeplabv3plus"),
        ("list keys", "unseen_clients"),
        ("list strategies", "fixbn"),
        ("list data", "cifar10"),
        ("show strategy fedfn", "options"),
        ("show data cifar10", "Krizhevsky"),
        ("show partition dirichlet", "alpha"),
        ("show aggregator nnm", "NNM"),
        ("show model resnet18", "resnet18"),
        ("compare --help", "--statistics-aggregator"),
        ("run --help", "--superlink"),
        ("reproduce --help", "--scale"),
        ("doctor --help", "--participation"),
        ("check --help", "--kind"),
        ("data --help", "get"),
        ("data get --help", "--data-dir"),
        ("--show-completion bash", "_FEDNORM_COMPLETE"),
    ],
)
def test_a_command_that_tells_something_needs_no_torch(command, answer):
    told, imported = run(CALL.format(heavy=HEAVY), *command.split())
    assert answer in told
    assert imported == "imported:"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("compare --part", ["--participation", "--partition"]),
        ("compare --strategies gn,fixb", ["gn,fixbn"]),
        ("compare --set unseen_c", ["unseen_clients="]),
        ("compare --set partition=dirichlet_", ["partition=dirichlet_unbalanced="]),
        ("compare --set algorithm.server_l", ["algorithm.server_lr="]),
        ("compare --sweep strategy.freeze_r", ["strategy.freeze_round="]),
        ("show strategy gn", ["gn", "gn_ws"]),
        ("list k", ["keys"]),
        ("doctor mobile", ["mobilenet_v2"]),
        ("reproduce fixbn-tableH", ["fixbn-tableH"]),
        ("export folder --format csv,p", ["csv,pdf", "csv,png"]),
    ],
)
def test_shell_completion_needs_no_torch(typed, offered):
    line = {"_TYPER_COMPLETE_ARGS": f"fednorm {typed}", "COMP_WORDS": f"fednorm {typed}"}
    position = {"_FEDNORM_COMPLETE": "complete_bash", "COMP_CWORD": str(len(typed.split()))}
    told, imported = run(CALL.format(heavy=HEAVY), **line, **position)
    assert sorted(told.split()) == offered
    assert imported == "imported:"


@pytest.mark.slow
def test_the_check_sees_torch():
    _, imported = run("import torch\n" + CALL.format(heavy=HEAVY), "--help")
    assert "torch" in imported


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "imported"),
    [
        ("import fednorm", False),
        ("import fednorm; dir(fednorm)", False),
        ("import fednorm; fednorm.list_strategies(); fednorm.list_datasets()", False),
        ("import fednorm; fednorm.errors.ConfigError", False),
        ("import fednorm.experiment.schema.config, fednorm.experiment.schema.load", False),
        ("import fednorm; fednorm.create_strategy('fbn')", True),
        ("import fednorm; fednorm.doctor.examine", True),
    ],
)
def test_importing_the_package_imports_torch_when_it_is_needed(code, imported):
    told, _ = run(f"{code}\nimport sys; print('torch' in sys.modules); print(0, file=sys.stderr)")
    assert told.strip() == str(imported)
