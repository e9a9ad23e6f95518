"""Every code block of README and docs runs, and every command and option in them exists.

A block that cannot run here has a comment before it, `<!-- run: skip because … -->`, or is only
read with `<!-- run: check because … -->`; EXCEPTIONS counts both.
"""

import dataclasses
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from importlib.util import find_spec

import numpy as np
import pytest
from PIL import Image
from typer.main import get_command
from typer.testing import CliRunner

from docs.pages import PAGES, ROOT, list_blocks, list_spans, name_of
from fednorm.aggregators import AGGREGATORS, PRE_AGGREGATORS
from fednorm.algorithms import ALGORITHMS
from fednorm.attacks import ATTACKS
from fednorm.cli import app
from fednorm.data import DATASETS
from fednorm.data.partition import PARTITIONS
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.schema.load import build_experiment
from fednorm.experiment.schema.specs import PrivacySpec
from fednorm.models import MODELS
from fednorm.reproduce.figure import Figure, list_figures, scale_figure
from fednorm.strategies import STRATEGIES

EXCEPTIONS = {
    ("docs/data.md", "check"): 2,  # a download; modules of the user
    ("docs/deploy.md", "check"): 1,  # a running SuperLink
    ("docs/deploy.md", "skip"): 3,  # the SuperLink, its nodes, and their registration
    ("docs/local-epochs.md", "check"): 1,  # CIFAR-10
    ("docs/privacy.md", "check"): 2,  # long benchmarks
    ("docs/results.md", "check"): 1,  # CIFAR-10
    ("examples/plugin/README.md", "check"): 1,  # a package that is not installed
    ("examples/flower_hospital/README.md", "check"): 1,  # the models of a run
    ("examples/flower_hospital/README.md", "skip"): 2,  # a SuperLink, and machines
    ("examples/flower_quickstart/README.md", "check"): 1,  # 21 runs
    ("examples/flower_quickstart/README.md", "skip"): 1,  # a SuperLink
}
LANGUAGES = {"python", "sh", "toml", "text", "diff", "mermaid"}
# Appended to a command, so that it takes a second.
SHORT = {
    "compare": "--set rounds=2 --set seeds=1 --workers 1 --fresh",
    "run": "--set rounds=2 --set seeds=1 --workers 1",
    "doctor": "--batches 1 --budget 1r",
    "check": "--fast",
    "ring": "--rounds 3",
}
SMALL_IMAGES = "--set data.size=16 --set batch_size=4 --set rounds=1"  # for ResNet-18
FEW_DIGITS = "--set data.test=1500"  # of 1797: the others are for training
NARROW = "--set model.widths=[4,8]"  # for the small residual network
# Instead of the numbers of a Python block.
QUICK = {r"\brounds=\d+": "rounds=2", r"\bseeds=\d+": "seeds=1"}
ONLY_CHECKED = {"reproduce", "make", "pip", "python", "export"}  # long, or about this environment
ADDRESS = {"HOST": "127.0.0.1", "PORT": "9400"}
FOREIGN = {  # options of Flower's commands
    "--database",
    "--disable-runtime-dependency-installation",
    "--enable-supernode-auth",
    "--isolation",
    "--node-config",
    "--port",
    "--run-config",
}
MODULE = """
from torch import nn

def net(shape, classes):
    return nn.Sequential(
        nn.Conv2d(shape[0], 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(4, classes),
    )
"""
REGISTRIES = (
    STRATEGIES, ALGORITHMS, AGGREGATORS, PRE_AGGREGATORS, ATTACKS, PARTITIONS, DATASETS, MODELS,
)  # fmt: skip
SHELL = list_blocks("sh")
(METHODS,) = (block for block in list_blocks("python") if block.text.startswith('"""Methods'))


@pytest.fixture
def folder(tmp_path, monkeypatch, narrow_networks):
    """Make a folder with everything that the commands of the docs expect to find."""
    del narrow_networks
    monkeypatch.setattr("fednorm.doctor.race.RATES", (1.0,))
    monkeypatch.setattr("fednorm.doctor.race.CANDIDATES", ("naive", "fbn"))
    # Plots take a third of the time, and have tests of their own.
    monkeypatch.setattr("fednorm.report.write.write_png", lambda *_: None)
    for place in ("curves", "heatmaps"):
        monkeypatch.setattr(f"fednorm.report.{place}.render_svg", lambda *_: "")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "models.py").write_text(MODULE)
    (tmp_path / "methods.py").write_text(METHODS.text)
    rng = np.random.default_rng(0)
    for place in ("photos", "PACS"):
        for domain in ("art", "cartoon", "photo", "sketch"):
            for label in ("dog", "house"):
                images = tmp_path / place / domain / label
                images.mkdir(parents=True)
                for i in range(6):
                    pixels = rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(images / f"{i}.jpg")
    monkeypatch.setenv("FEDNORM_DATA", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_block_has_a_language_that_is_tested():
    blocks = list_blocks()
    assert len(blocks) > 40
    assert {str(b): b.language for b in blocks if b.language not in LANGUAGES} == {}
    assert [str(b) for b in blocks if b.language == "text" and "fednorm " in b.text[:8]] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_command_hides_in_an_indented_block(page):
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^ {4,}(?:fednorm|python|make|pip|flwr) .*", text, re.MULTILINE) == []


def test_the_exceptions_are_few_and_say_why():
    marked = [block for block in list_blocks() if block.how]
    assert all(block.why and len(block.why) > 10 for block in marked)
    assert Counter((block.page, block.how) for block in marked) == EXCEPTIONS


def test_readme_begins_with_its_two_commands():
    first = next(block for block in SHELL if block.page == "README.md")
    assert first.commands == [["make", "demo"], ["make", "test"]]


def parse_options(arguments, *, bare=False):
    """Raise if the command line does not know a command, an option, or the form of a value.

    `bare` allows a command without the arguments that it needs: its name in a sentence.
    """
    group, name = get_command(app), ""
    context = group.make_context("fednorm", [], resilient_parsing=True)
    while hasattr(group, "commands") or hasattr(group, "list_commands"):
        if not arguments:
            return "help"
        name, *arguments = arguments
        group = group.get_command(context, name)
        assert group is not None, f"there is no command {name!r}"
    if arguments or not bare:
        group.make_context(name, list(arguments))
    return name


def check_command(words, *, bare=False):
    """Raise if a command of the docs could not be called as it is written."""
    program, *arguments = words
    if program == "fednorm":
        name = parse_options(arguments, bare=bare)
        if name == "reproduce" and arguments[1:] and "--list" not in arguments:
            assert arguments[1] in list_figures()
        return name
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(arguments) <= set(targets)
    elif program == "python":
        script = ROOT / arguments[0]
        assert script.is_file()
        options = [word for word in arguments[1:] if word.startswith("--")]
        assert all(option in script.read_text() for option in options)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]
        asked = re.findall(r"\[(\w+)\]", " ".join(arguments))
        assert arguments[0] == "install"
        assert set(asked) <= set(extras)
    return program


@pytest.mark.slow
@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands_exist_and_know_their_options(block):
    assert block.commands
    for words in block.commands:
        check_command(words)


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in SHELL if not block.how], ids=str)
@pytest.mark.usefixtures("folder")
def test_commands_run(block):
    programs = {words[0] for words in block.commands}
    if not programs & {"fednorm", *ONLY_CHECKED}:
        run_shell(block, programs)
        return
    for words in block.commands:
        name = check_command(words)
        if name in ONLY_CHECKED and "--list" not in words:
            continue
        assert words[0] == "fednorm", f"{words[0]} is run by no test"
        arguments = [*words[1:], *shlex.split(shorten(name, words))]
        result = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})
        assert result.exit_code == 0, f"{arguments}: {result.output} {result.exception!r}"


def shorten(name, words):
    """Return options that make a command short: few rounds, samples and channels."""
    if name not in SHORT or name in {"ring", "check"}:
        return SHORT.get(name, "")
    if "folder" in words:
        return f"{SHORT[name]} {SMALL_IMAGES}"
    setting = (ROOT / words[2]).read_text() if words[2].startswith("configs/") else str(words)
    narrow = NARROW if re.search(r"\Wresnet\W", setting) else ""
    few = "" if name == "doctor" and "--data" not in words else FEW_DIGITS
    return f"{SHORT[name]} {narrow} {few}"


def run_shell(block, programs):
    """Run a block that calls the system's own programs."""
    if missing := [name for name in programs - {"printf"} if not shutil.which(name)]:
        pytest.skip(f"{', '.join(missing)} is not installed")
    subprocess.run(
        ["bash", "-e", "-u", "-c", block.text],  # noqa: S607 (bash is where the user has it)
        env={**os.environ, **ADDRESS},
        check=True,
        timeout=60,
    )


@pytest.mark.parametrize("block", list_blocks("toml"), ids=str)
def test_a_toml_block_is_an_experiment(block, tmp_path, monkeypatch):
    if "methods:" in block.text:
        (tmp_path / "methods.py").write_text(METHODS.text)
        monkeypatch.chdir(tmp_path)
    values = tomllib.loads(block.text)
    if "panels" in values:
        assert scale_figure(Figure.model_validate(values), "full")
    else:
        build_experiment(values)


def test_the_experiment_of_the_deployment_is_one():
    (text,) = [b.heredocs["ours.toml"] for b in SHELL if "ours.toml" in b.heredocs]
    assert build_experiment(tomllib.loads(text)).clients == 2


@pytest.mark.slow
def test_python_blocks_run(folder):
    """Run the Python blocks of each page as one program, all in a new process."""
    blocks = list_blocks("python")
    assert not any(block.how for block in blocks)
    if not find_spec("flwr"):
        blocks = [block for block in blocks if "flower" not in block.text]
    if not all(find_spec(name) for name in ("onnxscript", "onnxruntime")):
        blocks = [block for block in blocks if "torch.onnx" not in block.text]
    programs = {}
    for block in blocks:  # at the lines of the page, for the traceback
        before = programs.get(block.page, "")
        programs[block.page] = before + "\n" * (block.line - before.count("\n")) + block.text
    script = [f"programs = {programs!r}", "for page, text in programs.items():"]
    script += [
        "    exec(compile(text, page, 'exec'), {'__name__': page})",
        "    print('ran', page)",
    ]
    (folder / "pages.py").write_text(shorten_python("\n".join(script)))
    found = subprocess.run(
        [sys.executable, folder / "pages.py"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    assert re.findall(r"^ran (.+)$", found.stdout, re.MULTILINE) == list(programs)


def shorten_python(text):
    """Return a program with fewer rounds and seeds."""
    for long, short in QUICK.items():
        text, count = re.subn(long, short, text)
        assert count, f"no block has {long}"
    return text


@pytest.mark.slow
def test_the_example_runs(capsys):
    runpy.run_path(str(ROOT / "examples" / "own_loop.py"), run_name="__main__")
    accuracy = re.fullmatch(r"accuracy after 150 rounds: ([\d.]+)%\n", capsys.readouterr().out)
    assert float(accuracy[1]) > 90


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("text_classification", 60),
        ("tabular_regression", 50),
        ("time_series", 80),
        ("segmentation", 80),
    ],
)
def test_examples_of_own_data_learn(name, least, capsys):
    source = ROOT / "examples" / f"{name}.py"
    assert len(source.read_text(encoding="utf-8").splitlines()) < 60
    runpy.run_path(str(source), run_name="__main__")
    reached = [float(n) for n in re.findall(r"(-?[\d.]+)%", capsys.readouterr().out)]
    assert len(reached) >= 3
    assert max(reached) > least


CURRENT = [page for page in PAGES if page.name != "CHANGELOG.md"]  # the rest is history


@pytest.mark.slow
@pytest.mark.parametrize("page", CURRENT, ids=name_of)
def test_commands_in_the_text_exist(page):
    for span in list_spans(page):
        if span.startswith(("fednorm ", "python ", "make ", "pip ")):
            check_command(shlex.split(span), bare=True)


@pytest.mark.parametrize("page", CURRENT, ids=name_of)
def test_options_in_the_text_exist(page):
    group = get_command(app)
    context = group.make_context("fednorm", [], resilient_parsing=True)
    known = set(FOREIGN)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        inner = (
            [command.get_command(context, n) for n in command.list_commands(context)]
            if hasattr(command, "list_commands")
            else [command]
        )
        known |= {option for c in inner for p in c.params for option in p.opts}
    found = {span.split()[0] for span in list_spans(page) if span.startswith("--")}
    assert found <= known


@pytest.mark.parametrize("page", CURRENT, ids=name_of)
def test_keys_in_the_text_exist(page):
    """Check `key = value`; shorter names are those of formulas."""
    known = {*Experiment.model_fields, *PrivacySpec.model_fields}
    for registry in REGISTRIES:
        known |= {field.name for cls in registry.values() for field in dataclasses.fields(cls)}
    spans = [re.match(r"([a-z_]{4,}) = ", span) for span in list_spans(page)]
    assert {match[1] for match in spans if match} <= known
