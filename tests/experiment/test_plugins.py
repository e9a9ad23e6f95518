"""A class of the user's, or an entry point of a package, wherever a registered name goes."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fednorm
from fednorm import names
from fednorm.aggregators import AGGREGATORS, create_aggregator, format_aggregator
from fednorm.cli import app
from fednorm.cli.listing import KINDS
from fednorm.cli.options import complete_key
from fednorm.contract import examine_plugin, guess_kind
from fednorm.data.partition import PARTITIONS, create_partition
from fednorm.errors import ConfigError, UnknownNameError
from fednorm.experiment.schema.load import build_experiment, describe_objects
from fednorm.models import MODELS, create_model
from fednorm.objects import OBJECT
from fednorm.strategies import STRATEGIES
from fednorm.strategies.fedbn import FedBN
from fednorm.strategies.gn import GN

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin"
SHORT = {"rounds": 2, "seeds": 1, "clients": 4}
OURS = '''
"""Methods of ours."""

from dataclasses import dataclass

import numpy as np
from torch import nn

from fednorm.aggregators.base import CoordinateRule, PreAggregator
from fednorm.algorithms.fedavg import FedAvg
from fednorm.attacks import Attack
from fednorm.data import DATASETS
from fednorm.data.partition import Partition
from fednorm.nn import rules
from fednorm.registry import param
from fednorm.strategies.base import SharedStatisticsStrategy
from fednorm.strategies.fedbn import FedBN


@dataclass(frozen=True)
class Mine(SharedStatisticsStrategy):
    """Shared statistics."""

    period: int = param(2, "rounds")

    def rule(self, broadcast):
        return rules.shared_stats if broadcast.round % self.period else rules.batch_stats_recorded


@dataclass(frozen=True)
class Own(FedBN):
    """Personal layers."""

    strength: float = param(1.0, "nothing")


@dataclass(frozen=True)
class Middle(CoordinateRule):
    """The median."""

    def reduce(self, rows, scratch):
        return rows.median(0).values


@dataclass(frozen=True)
class Slow(FedAvg):
    """FedAvg."""


@dataclass(frozen=True)
class Twice(Attack):
    """Doubles."""

    scale: float = param(2.0, "factor")

    def corrupt(self, own, context):
        return own * self.scale


@dataclass(frozen=True)
class Split(Partition):
    """Even parts."""

    argument = "share"
    share: float = param(0.5, "nothing")
    extra: int = param(1, "nothing")

    def split(self, labels, clients, rng, groups):
        return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients)]


@dataclass(frozen=True)
class Net:
    """A small network."""

    width: int = param(8, "of the hidden layer")

    def build(self, shape, classes):
        width = self.width
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width), nn.Linear(width, classes)
        )


@dataclass(frozen=True)
class Numbers:
    """Digits."""

    test: int = param(1700, "test samples")

    def load(self, seed):
        return DATASETS.create("digits", {"test": self.test}).load(seed)


class NotDerived:
    pass


@dataclass(frozen=True)
class Lacking(CoordinateRule):
    pass


class NoDataclass(FedBN):
    pass


@dataclass(frozen=True)
class NoSplit:
    argument = None
'''


@pytest.fixture
def ours(tmp_path, monkeypatch):
    """Return a module of the current directory, imported anew by every test."""
    (tmp_path / "ours.py").write_text(OURS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "ours", raising=False)
    names.user_directories.clear()
    yield "ours"
    sys.modules.pop("ours", None)


ALL = {
    "strategies": ["ours:Mine", "centralized:ours:Mine", {"name": "ours:Own", "strength": 2}],
    "algorithm": {"name": "ours:Slow", "lr": 0.1},
    "aggregator": "nnm > ours:Middle(f=1)",
    "attack": {"name": "ours:Twice", "scale": 3.0},
    "byzantine": 1,
    "partition": "ours:Split=0.3",
    "model": {"name": "ours:Net", "width": 6},
    "data": {"name": "ours:Numbers", "test": 1600},
}


@pytest.mark.slow
@pytest.mark.usefixtures("ours")
def test_all_that_has_a_name_may_be_ours_in_worker_processes_too():
    alone = fednorm.compare(**ALL, **SHORT, out="alone")
    assert [run.status for run in alone.runs] == ["finished"] * 3
    assert alone.runs[0].tested == 1600
    several = fednorm.compare(**ALL, **SHORT, out="several", workers=2)
    for one, other in zip(alone.runs, several.runs, strict=True):
        assert one.history == other.history
    written = tomllib.loads(Path("alone/config.toml").read_text())
    assert fednorm.compare(**written).runs[0].history == alone.runs[0].history
    loop, in_processes = (fednorm.compare(**ALL, **SHORT, engine=e) for e in ("loop", "processes"))
    for one, other in zip(loop.runs, in_processes.runs, strict=True):
        assert one.history == other.history


@pytest.mark.slow
@pytest.mark.usefixtures("ours")
def test_objects_are_their_names_with_fields():
    assert create_partition("ours:Split")  # which imports the module
    mod = sys.modules["ours"]
    given = {
        "strategies": [mod.Mine(period=3), mod.Mine(), "fbn", GN(groups=3)],
        "algorithm": mod.Slow(lr=0.1),
        "aggregator": mod.Middle(f=1),
        "attack": mod.Twice(scale=3.0),
        "partition": mod.Split(share=0.3, extra=2),
        "model": mod.Net(width=6),
        "data": mod.Numbers(test=1600),
    }
    assert describe_objects(given) == {
        "strategies": [
            {"name": "ours:Mine", "period": 3, "label": "ours:Mine(period=3)"},
            {"name": "ours:Mine", "label": "ours:Mine"},
            "fbn",
            {"name": "gn", "groups": 3},
        ],
        "algorithm": {"name": "ours:Slow", "lr": 0.1},
        "aggregator": "ours:Middle(f=1)",
        "attack": {"name": "ours:Twice", "scale": 3.0},
        "partition": "ours:Split(share=0.3, extra=2)",
        "model": {"name": "ours:Net", "width": 6},
        "data": {"name": "ours:Numbers", "test": 1600},
    }
    found = fednorm.compare(**given, byzantine=1, **SHORT, workers=2)
    assert [run.status for run in found.runs] == ["finished"] * 4
    rule = create_partition("ours:Split(share=0.3, extra=2)")
    assert rule == mod.Split(share=0.3, extra=2)
    entry = {"name": "fbn", "aggregator": mod.Middle(f=1)}
    assert describe_objects({"strategies": [entry]})["strategies"][0]["aggregator"] == (
        "ours:Middle(f=1)"
    )


def test_pipelines_are_written_as_text():
    for text in ("mean", "nnm > trimmed_mean(f=2)", "bucketing(size=3) > median"):
        assert format_aggregator(create_aggregator(text)) == text


def test_partitions_take_fields_in_brackets():
    one = create_partition("feature_shift(kind=noise, strength=2.0, labels=dirichlet(alpha=0.1))")
    assert one == create_partition("feature_shift=noise", strength=2.0, labels=one.labels)
    assert create_partition("dirichlet(alpha=0.3) + feature_shift=noise").labels == (
        "dirichlet(alpha=0.3)"
    )
    with pytest.raises(UnknownNameError, match="did you mean 'alpha'"):
        create_partition("dirichlet(alpha=0.3, alfa=1)")


def test_a_class_that_was_typed_in_runs_here_alone(tmp_path):
    @dataclass(frozen=True)
    class Typed(FedBN):
        factor: float = 2.0

    given = [Typed(factor=3.0), "fbn"]
    found = fednorm.compare(given, **SHORT, out=tmp_path / "out")
    assert [run.strategy for run in found.runs] == ["Typed", "fbn"]
    entry = found.config["strategies"][0]
    assert re.fullmatch(rf"{OBJECT}Typed@[0-9a-f]{{12}}", entry["name"])
    assert entry["factor"] == 3.0
    again = fednorm.compare(given, **SHORT, out=tmp_path / "out")
    assert again.runs == found.runs  # which were recorded
    for apart in ({"workers": 2}, {"engine": "processes"}, {"engine": "flower"}):
        with pytest.raises(ConfigError, match="Typed is a class of this session"):
            fednorm.compare(given, **SHORT, **apart)


def test_another_session_reads_what_a_typed_class_left(tmp_path, monkeypatch):
    @dataclass(frozen=True)
    class Gone(FedBN):
        pass

    fednorm.compare([Gone()], **SHORT, out=tmp_path / "out")
    monkeypatch.setattr("fednorm.registry.held", {})
    fednorm.compare(["fbn"], **SHORT, out=tmp_path / "out")
    with pytest.raises(ConfigError, match="was given as an object in Python; give it"):
        fednorm.load(tmp_path / "out" / "runs" / "Gone-seed0", client=0)


def test_other_values_than_plain_ones_are_refused():
    @dataclass(frozen=True)
    class Odd(FedBN):
        factor: object = None

    with pytest.raises(ConfigError, match=r"factor of Odd is Tensor .* no configuration can hold"):
        fednorm.compare([Odd(factor=torch.ones(1))], **SHORT)
    with pytest.raises(ConfigError, match=r"Odd is a class; give an object, Odd\(\)"):
        fednorm.compare([Odd], **SHORT)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"strategies": ["ours:Mien"]}, "did you mean 'Mine'"),
        ({"strategies": ["nowhere:Mine"]}, "needs module 'nowhere', but there is none in"),
        ({"strategies": ["ours:"]}, "'package.module:class', but got 'ours:'"),
        ({"strategies": ["ours:NotDerived"]}, "does not derive from Strategy"),
        ({"strategies": ["ours:NoDataclass"]}, r"write @dataclass\(frozen=True\)"),
        ({"strategies": ["ours:np"]}, "module .* not a class"),
        ({"strategies": [{"name": "ours:Mine", "perod": 3}]}, "did you mean 'period'"),
        ({"strategies": [{"name": "ours:Mine", "period": "x"}]}, "period = 'x' is not valid"),
        ({"aggregator": "ours:Lacking"}, "aggregator 'ours:Lacking' lacks reduce"),
        ({"aggregator": "ours:Middle > ours:Middle"}, "does not derive from PreAggregator"),
        ({"partition": "ours:NoSplit"}, "lacks split, transform"),
        ({"partition": "ours:Split=x"}, "needs a number for share"),
        ({"algorithm": "ours:Mine"}, "lacks apply, change"),
        ({"attack": "ours:Mine", "byzantine": 1}, "does not derive from Attack"),
    ],
)
@pytest.mark.usefixtures("ours")
def test_what_is_wrong_is_said(settings, said):
    with pytest.raises((ConfigError, UnknownNameError), match=said):
        build_experiment({**SHORT, **settings})


@pytest.mark.usefixtures("ours")
def test_a_model_may_be_a_class():
    assert isinstance(create_model("ours:Net", (64,), 3, seed=0)[1], torch.nn.Linear)
    assert create_model("ours:Net", (64,), 3, seed=0, width=5)[1].out_features == 5
    with pytest.raises(UnknownNameError, match="did you mean 'width'"):
        create_model("ours:Net", (64,), 3, seed=0, widht=5)


def test_a_function_may_need_the_shape_of_samples(target):
    (target / "installed.py").write_text(
        "from torch import nn\n"
        "def net(shape, classes, width=4):\n"
        "    body = nn.Linear(shape[1] * shape[2], width), nn.BatchNorm1d(width)\n"
        "    return nn.Sequential(nn.Flatten(), *body, nn.Linear(width, classes))\n"
    )
    net = importlib.import_module("installed").net
    made = fednorm.compare(["fbn"], model=net, **SHORT)
    named = fednorm.compare(["fbn"], model="installed:net", out=target / "named", **SHORT)
    loaded = fednorm.load(target / "named", net).state_dict()
    trained = named.runs[0].model().state_dict()
    assert all(torch.equal(value, loaded[key]) for key, value in trained.items())
    assert made.config["model"] == {"name": "installed:net"}
    assert made.runs[0].history == named.runs[0].history
    with pytest.raises(ConfigError, match="model 'Linear' needs in_features, out_features; a func"):
        fednorm.compare(["fbn"], model=torch.nn.Linear, **SHORT)
    with pytest.raises(ConfigError, match=r"<lambda>' needs shape; .* without arguments"):
        fednorm.compare(["fbn"], model=lambda shape: net(shape, 10), **SHORT)


@pytest.mark.usefixtures("ours")
def test_registries_tell_what_they_find():
    assert "ours:Mine" in STRATEGIES
    assert "ours:Middle" not in STRATEGIES
    assert "ours:Nothing" not in STRATEGIES
    assert not MODELS.has_own("ours:Net")
    assert STRATEGIES.locate("ours:Mine") == ("ours", "Mine")
    assert STRATEGIES.name_of(sys.modules["ours"].Mine) == "ours:Mine"
    assert STRATEGIES.name_of(FedBN) == "fedbn"
    assert PARTITIONS.get("ours:Split").argument == "share"
    assert "ours:Mine" not in set(STRATEGIES)


@pytest.mark.usefixtures("ours")
def test_a_file_does_not_make_anything_be_imported():
    fednorm.compare(["ours:Own"], **SHORT, out="out")
    run = "out/runs/ours_Own-seed0"
    assert fednorm.load(run, client=0)
    del sys.modules["ours"]
    with pytest.raises(ConfigError, match="write `import ours` first"):
        fednorm.load(run, client=0)
    assert "ours" not in sys.modules


@pytest.mark.slow
@pytest.mark.usefixtures("ours")
def test_a_run_of_ours_that_is_stopped_resumes():
    settings = {**SHORT, "rounds": 30, "partition": "ours:Split"}
    whole = fednorm.compare(["ours:Mine"], **settings).runs[0]
    code = (
        "import fednorm, os, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # may be ignored in tests
        "from fednorm.experiment import run_folder\n"
        "run_folder.CHECKPOINT_SECONDS = 0.0\n"
        "after, seen = run_folder.RunCheckpointer.after, []\n"
        "def kill(self, result, recorder):\n"
        "    after(self, result, recorder)\n"
        "    if result.state.round == 12:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "run_folder.RunCheckpointer.after = kill\n"
        f"run = fednorm.compare(['ours:Mine'], out='out', **{settings}).runs[0]\n"
        "print(run.status, run.rounds)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert said.stdout.split()[0] == "interrupted"
    resumed = fednorm.compare(["ours:Mine"], out="out", **settings).runs[0]
    assert resumed.status == "finished"
    assert resumed.history == whole.history


# Entry points.


def install(target, name="fednorm-alternating", points=None, module=None):
    """Write what `pip install --target` does: the package, and the list of its entry points."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    info = target / f"{name.replace('-', '_')}-1.0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n")
    lines = []
    for group, entries in (points or project["entry-points"]).items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
    if points is None:
        shutil.copytree(EXAMPLE / "alternating", target / "alternating")
    if module is not None:
        (target / module).write_text(OURS)


@pytest.fixture
def target(tmp_path, monkeypatch):
    """Return a folder from which packages are installed."""
    folder = tmp_path / "target"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in ("alternating", "installed"):
        for known in [m for m in sys.modules if m.partition(".")[0] == name]:
            del sys.modules[known]
    names._read_plugins.cache_clear()
    names._list_entry_points.cache_clear()
    names.warn_once.cache_clear()


def test_names_of_packages_are_found_and_listed(target):
    install(target)
    assert "alternating" in STRATEGIES
    assert "alternating" in fednorm.list_strategies()
    assert "alternating" not in set(STRATEGIES)
    assert "midrange" in fednorm.list_aggregators()
    assert fednorm.create_strategy("alternating", period=3).period == 3
    assert fednorm.create_aggregator("nnm > midrange", f=1).rule.f == 1
    made = fednorm.create_strategy("alternating")
    assert STRATEGIES.describe(made) == {"name": "alternating"}
    with pytest.raises(UnknownNameError, match="did you mean 'alternating'"):
        fednorm.create_strategy("alternatin")
    assert names.find_plugin("metric", "top2").__name__ == "score_top2"
    listed = " ".join(CliRunner().invoke(app, ["list", "strategies"]).output.split())
    assert re.search(r"alternating Shared .* \(package fednorm-alternating\)", listed)
    listed = CliRunner().invoke(app, ["list"]).output
    assert "top2" in listed
    assert "losses" not in listed  # no package has one
    assert complete_key("metrics")("t") == ["top2"]
    shown = CliRunner().invoke(app, ["show", "metric", "top2"]).output
    assert "share of samples whose class is among the two" in " ".join(shown.split())
    assert "package.module:function" in CliRunner().invoke(app, ["list", "losses"]).output
    shown = CliRunner().invoke(app, ["show", "strategy", "alternating"]).output
    assert "rounds from one with shared" in shown


def test_runs_use_losses_metrics_and_callbacks_of_packages(target):
    group = "installed"
    install(
        target,
        "fednorm-installed",
        {
            "fednorm.losses": {"soft": f"{group}:SoftLoss"},
            "fednorm.metrics": {"negative": f"{group}:count_negative"},
            "fednorm.callbacks": {"second": f"{group}:EndAtSecond"},
        },
    )
    (target / f"{group}.py").write_text(
        "import fednorm\n"
        "from torch import nn\n"
        "class SoftLoss(nn.CrossEntropyLoss):\n"
        "    def __init__(self, smoothing=0.5):\n"
        "        super().__init__(label_smoothing=smoothing)\n"
        "def count_negative(outputs, targets):\n"
        "    return -float(len(targets))\n"
        "class EndAtSecond(fednorm.Callback):\n"
        "    def on_round(self, event):\n"
        "        return event.round == 2\n"
    )
    tiny = {"clients": 3, "seeds": 1, "rounds": 2, "eval_every": 1}
    chosen = {"loss": "soft", "metrics": ["negative"], "callbacks": ["second"]}
    [run] = fednorm.compare(["gn"], **{**tiny, "rounds": 4}, **chosen).runs
    [plain] = fednorm.compare(["gn"], **tiny).runs
    assert (run.status, run.rounds) == ("stopped early", 2)
    assert run.final.metrics == {"negative": -float(run.tested)}
    assert run.final.loss != plain.final.loss
    for key, kind in (("loss", "loss"), ("metrics", "metric")):
        with pytest.raises(ConfigError, match=rf"a {kind} is .* registers \((soft|negative)\)"):
            fednorm.compare(["gn"], **tiny, **{key: "sof"})


FUNCTIONS = '''
import fednorm

def load(seed, size=400):
    """Load numbers."""

def build(shape, classes, width=8):
    """Build a network."""

def measure(outputs, targets):
    """Measure something."""

class Ending(fednorm.Callback):
    """End a run."""

    def __init__(self, after=3):
        self.after = after
'''


@pytest.mark.parametrize(
    ("kind", "name", "shown"),
    [
        ("data", "numbers", "Load numbers. Parameters name default meaning size 400"),
        ("model", "net", "Build a network. Parameters name default meaning width 8"),
        ("model", "installed:build", "Build a network. Parameters name default meaning width 8"),
        ("callback", "ending", "End a run. Parameters name default meaning after 3"),
        ("metric", "measure", "Measure something. No parameters."),
        ("loss", "torch:dist", "No parameters."),
    ],
)
def test_functions_of_packages_are_shown(target, kind, name, shown):
    points = {
        "fednorm.datasets": {"numbers": "installed:load"},
        "fednorm.models": {"net": "installed:build"},
        "fednorm.metrics": {"measure": "installed:measure"},
        "fednorm.callbacks": {"ending": "installed:Ending"},
    }
    install(target, "functions", points)
    (target / "installed.py").write_text(FUNCTIONS)
    assert shown in " ".join(CliRunner().invoke(app, ["show", kind, name]).output.split())


def test_the_kind_of_what_a_package_registers_is_known(target):
    points = {
        "fednorm.metrics": {"measure": "installed:measure"},
        "fednorm.losses": {"bad": "installed:measure"},
        "fednorm.callbacks": {"ending": "installed:Ending"},
    }
    install(target, "functions", points)
    (target / "installed.py").write_text(FUNCTIONS)
    assert guess_kind("measure") == "metric"
    assert guess_kind("bad") == "loss"
    for name in ("ending", "installed:Ending", "early_stopping"):
        with pytest.raises(ConfigError, match="a callback has no promises to check; these have: "):
            next(examine_plugin(name))


def test_an_entry_point_cannot_take_a_name_of_ours(target, caplog):
    points = {"fednorm.strategies": {"fbn": "os:system", "new": "installed:Own"}}
    install(target, "rude", points, "installed.py")
    assert STRATEGIES.list_plugins().keys() == {"new"}
    assert KINDS["strategies"].list_plugins().keys() == {"new"}  # strategies and centralized
    assert "package 'rude' registers the strategy 'fbn', which is a name of fednorm's own" in (
        caplog.text
    )
    assert type(fednorm.create_strategy("fbn")).__name__ == "FBN"
    assert type(fednorm.create_strategy("new")).__name__ == "Own"


def test_of_two_packages_with_a_name_one_is_left_out(target, caplog):
    for package in ("a", "b"):
        install(target, package, {"fednorm.strategies": {"same": f"installed:{package}"}})
    assert STRATEGIES.list_plugins()["same"].value == "installed:a"
    assert "package 'b' registers the strategy 'same', as 'a' does; name it 'installed:b'" in (
        caplog.text
    )


def test_a_broken_entry_point_breaks_nothing_else(target, caplog):
    points = {
        "fednorm.strategies": {"gone": "nowhere.at:All", "odd": "1 2 3", "bad": "installed:X"}
    }
    install(target, "broken", points, "installed.py")
    assert fednorm.create_strategy("gn")
    listed = CliRunner().invoke(app, ["list", "strategies"])
    assert listed.exit_code == 0
    assert "gn_ws" in listed.output
    for said in ("'1 2 3', which is not", "'gone', but 'nowhere.at' is missing"):
        (line,) = [one for one in caplog.messages if said in one]
        assert "'broken'" in line
    for name in ("gone", "bad"):
        with pytest.raises(ConfigError, match=f"'{name}' of package 'broken' cannot be used"):
            fednorm.create_strategy(name)


def test_a_list_of_entry_points_that_cannot_be_read_is_named(target, caplog):
    install(target)
    (target / "torn-1.dist-info").mkdir()
    (target / "torn-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torn\n")
    (target / "torn-1.dist-info" / "entry_points.txt").write_text("[fednorm.strategies]\nno value")
    assert "alternating" in STRATEGIES
    assert any("torn" in line for line in caplog.messages) or not caplog.messages


def test_an_entry_point_of_another_kind_is_refused(target):
    points = {"fednorm.aggregators": {"wrong": "installed:Own"}}
    install(target, "confused", points, "installed.py")
    with pytest.raises(ConfigError, match="aggregator 'wrong' does not derive from Rule"):
        AGGREGATORS.find("wrong")


@pytest.mark.slow
def test_the_example_passes_its_own_tests(tmp_path):
    install(tmp_path)
    shutil.copytree(EXAMPLE / "tests", tmp_path / "tests")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    assert "....." in done.stdout
