"""`fednorm check` finds what is wrong with a class, and says what to do."""

# ruff: noqa: ARG002 (methods of an interface)

import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from fednorm.aggregators.base import CoordinateRule, VectorRule
from fednorm.algorithms.fedavg import FedAvg
from fednorm.attacks.base import Attack
from fednorm.cli import app
from fednorm.contract import CHECKS, examine_plugin, guess_kind, run_check
from fednorm.core.strategy import Strategy
from fednorm.core.types import Kind, Role
from fednorm.data.partition import Partition
from fednorm.errors import ConfigError, UnknownNameError
from fednorm.nn import rules
from fednorm.nn.batch_norm import FedBatchNorm
from fednorm.strategies.base import SharedStatisticsStrategy
from fednorm.strategies.fedbn import FedBN


@dataclass(frozen=True)
class Unexplained(FedBN):
    factor: float = 1.0


@dataclass(frozen=True)
class Remembering(SharedStatisticsStrategy):
    seen = []  # noqa: RUF012 (which is what is wrong)

    def rule(self, broadcast):
        self.seen.append(broadcast.round)
        return rules.shared_stats if len(self.seen) < 2 else rules.batch_stats_recorded


@dataclass(frozen=True)
class InPlace(FedBN):
    def convert(self, model):
        next(model.parameters()).data.add_(1)
        return super().convert(model)


@dataclass(frozen=True)
class TrainsInEvaluation(SharedStatisticsStrategy):
    def convert(self, model):
        found = super().convert(model)
        for layer in found.model.modules():
            if isinstance(layer, FedBatchNorm):
                layer.eval = lambda: layer  # noqa: B023 (never leaves training)
                layer.register_forward_hook(lambda _, given, out: out - given[0].mean(0))
        return found


@dataclass(frozen=True)
class ByPlace(VectorRule):
    def coefficients(self, vectors):
        return torch.eye(len(vectors), dtype=torch.float64)[0]


@dataclass(frozen=True)
class NotRobust(CoordinateRule):
    def reduce(self, rows, scratch):
        return rows.mean(0)


@dataclass(frozen=True)
class AtRandom(CoordinateRule):
    def reduce(self, rows, scratch):
        return rows.median(0).values + 1e-9 * torch.rand(1)


@dataclass(frozen=True)
class Unseeded(Partition):
    argument = None

    def split(self, labels, clients, rng, groups):
        order = np.random.permutation(len(labels))  # noqa: NPY002 (which is what is wrong)
        return [np.sort(part) for part in np.array_split(order, clients)]


@dataclass(frozen=True)
class Incomplete(Partition):
    argument = None


@dataclass(frozen=True)
class Spoiling(Attack):
    def corrupt(self, own, context):
        return own.neg_()


@dataclass(frozen=True)
class Forgetful(FedAvg):
    steps = [0]  # noqa: RUF012 (which is what is wrong)

    def local(self, work):
        self.steps[0] += 1
        found = super().local(work)
        return type(found)(
            {k: v * self.steps[0] for k, v in found.update.items()}, found.examples, found.loss
        )


class NoScores(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.unused = nn.Linear(1, 1)
        self.last = nn.Linear(shape[0], classes)

    def forward(self, x):
        return self.last(x.mean((2, 3)))


def add_up(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="sum")


def count_first(outputs, targets):
    return float((outputs[0].argmax() == targets[0]) + outputs[0, 0])


class Largest:
    """As docs/data.md has it: an object that is not called."""

    def reset(self):
        self.worst = 0.0

    def update(self, outputs, targets):
        self.worst = max(self.worst, float((outputs - targets).abs().max()))

    def compute(self):
        return self.worst


@pytest.fixture
def here(monkeypatch):
    """Return how the classes of this file are named."""
    monkeypatch.setitem(sys.modules, "broken_methods", sys.modules[__name__])
    return "broken_methods"


BROKEN = [
    ("Unexplained", None, "Each field has a sentence", "factor has none"),
    ("Remembering", None, "A client's round is a pure", "left something behind"),
    ("InPlace", None, "It converts a copy", "convert a copy"),
    ("TrainsInEvaluation", None, "Evaluation of a sample", "change with the batch"),
    ("ByPlace", None, "The order of clients", "set `ordered = True`"),
    ("NotRobust", None, "Byzantine clients, f of them", "set robust = False"),
    ("AtRandom", None, "The same input gives", "global generator"),
    ("Unseeded", None, "The seed alone decides", "draw from the `rng`"),
    ("Spoiling", None, "What it sends", "in place"),
    ("Forgetful", None, "A client's round is a pure", "left something behind"),
    ("NoScores", None, "It maps a batch", "unused.weight gets no gradient"),
    ("add_up", "loss", "It is a mean", "divide by the number"),
    ("count_first", "metric", "The order of samples", "then"),
]


@pytest.mark.parametrize(("name", "kind", "promise", "problem"), BROKEN)
def test_a_broken_promise_is_found(here, name, kind, promise, problem):
    text = f"{here}:{name}"
    kind = kind or guess_kind(text)
    checks = [c for c in CHECKS[kind] if c.__doc__.startswith(promise)]
    (check,) = checks
    subject = globals()[name]
    if kind in {"aggregator", "partition"}:
        subject = text
    elif kind == "model":
        subject = lambda shape, classes, seed: NoScores(shape, classes)  # noqa: ARG005, E731
    elif kind not in {"loss", "metric"}:
        subject = subject()
    assert problem in run_check(check, subject).problem


def test_the_command_tells_and_fails(here):
    result = CliRunner().invoke(app, ["check", f"{here}:Unseeded"])
    assert result.exit_code == 1
    (line,) = [line for line in result.output.splitlines() if line.startswith("✗")]
    assert "The seed alone decides" in line
    assert "draw from" in result.output
    assert "1 of 7 promises are broken." in result.output


def test_an_incomplete_class_is_no_traceback(here):
    result = CliRunner().invoke(app, ["check", f"{here}:Incomplete"])
    assert result.exit_code == 1
    assert "lacks split" in " ".join(result.output.split())


@pytest.mark.parametrize("name", ["CrossEntropyLoss", "MSELoss", "BCEWithLogitsLoss"])
@pytest.mark.parametrize("kind", ["loss", "metric"])
def test_functions_of_classes_numbers_and_several_labels_are_checked(name, kind):
    found = examine_plugin(f"torch.nn:{name}", kind)  # a warning would be an error here
    assert not [one.problem for one in found if one.problem]


def test_a_metric_with_a_state_is_checked(here):
    found = examine_plugin(f"{here}:Largest", "metric")
    assert not [one.problem for one in found if one.problem]


def test_fields_are_given_in_brackets(here):
    (first, *_) = examine_plugin(f"{here}:Unexplained(factr=2)", "strategy", fast=True)
    assert "did you mean 'factor'" in first.problem


def test_the_kind_is_guessed_or_asked_for(here):
    assert guess_kind(f"{here}:ByPlace") == "aggregator"
    assert guess_kind("fixbn") == "strategy"
    with pytest.raises(ConfigError, match="say it with --kind, one of strategy"):
        guess_kind(f"{here}:add_up")
    with pytest.raises(UnknownNameError, match="did you mean 'fixbn'"):
        guess_kind("fxbn")
    with pytest.raises(UnknownNameError, match="did you mean 'Unseeded'"):
        guess_kind(f"{here}:Unseded")


def test_roles_that_fit_no_tensor_are_found():
    class Odd(Strategy):
        roles = {Kind.AFFINE: Role.SHARED}  # noqa: RUF012 (no dataclass)

        def convert(self, model):
            return FedBN().convert(model)

    (check,) = [c for c in CHECKS["strategy"] if c.__name__ == "check_roles"]
    assert run_check(check, Odd()).problem
