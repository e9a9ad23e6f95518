"""An engine that is asked for by name is tried on a user's model, and refused with the reason."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from fednorm.algorithms import create_algorithm
from fednorm.core.messages import Batches
from fednorm.core.task import export
from fednorm.data import load_dataset
from fednorm.data.federation import build_federation
from fednorm.data.sampling import Plan
from fednorm.engines import barrier, merged_batch, trial
from fednorm.engines.loop import rounds
from fednorm.errors import ConfigError
from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.schema.load import build_experiment
from support import ToyClients, task_of

DIGITS = {"rounds": 2, "seeds": 1, "clients": 4, "batch_size": 8, "partition": "iid"}
ENGINES = {
    "merged": {"strategies": ["naive"], "algorithm": "dsgd"},
    "stacked": {"strategies": ["naive"], "algorithm": "fedavg", "local_steps": 2},
    "barrier": {"strategies": ["fedtan"], "algorithm": "fedavg", "local_steps": 2},
}
TRIED = r"was tried on clients 0 and 1 in double precision, against the loop: "


class Own(nn.Module):
    """A user's model: every sample by itself, but for BatchNorm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.last = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(144, 10)

    def features(self, x):
        return self.norm(self.conv(x)).relu().flatten(1)

    def forward(self, x):
        return self.last(self.features(x))


class Centred(Own):
    """Uses the mean of the batch."""

    def forward(self, x):
        found = self.features(x)
        return self.last(found - found.mean(0))


class Folded(nn.Module):
    """Folds the rows of an image into the batch, all first rows before all second ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.last = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 10)

    def forward(self, x):
        rows = self.norm(self.inner(x.squeeze(1).transpose(0, 1).flatten(0, 1))).relu()
        return self.last(rows.view(8, len(x), -1).mean(0))


class Noisy(Own):
    """Draws random numbers where no layer shows it."""

    def forward(self, x):
        return self.last(functional.dropout(self.features(x), 0.5))


class Rolled(Own):
    """Mixes channels, which in a wide model are those of other clients."""

    def forward(self, x):
        return self.last(self.norm(self.conv(x)).roll(1, 1).relu().flatten(1))


class Scaled(Own):
    """Has a parameter outside any known layer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(144))

    def forward(self, x):
        return self.last(self.features(x) * self.scale)


NOTES = []  # outside of any module


class Noting(Own):
    """Keeps something outside of the module while its layer waits for others."""

    def forward(self, x):
        NOTES[:] = [x.mean()]
        found = self.features(x)
        return self.last(found * NOTES[0])


def run(name, model, **settings):
    return run_comparison(
        build_experiment({**DIGITS, **ENGINES[name], "engine": name, **settings}), model=model
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("merged", Centred),
        ("merged", Folded),
        ("merged", Noisy),
        ("stacked", Rolled),
        ("stacked", Noisy),
        ("barrier", Noting),
    ],
)
def test_a_model_for_which_an_engine_is_not_exact_is_refused(name, made):
    with pytest.raises(ConfigError) as refused:
        run(name, made())
    said = str(refused.value)
    assert re.search(f"engine '{name}' {TRIED}the ", said)
    assert said.endswith("choose engine 'auto' or 'loop'.")
    found = re.search(r"is off by (\S+), and rounding explains 1e-09 at most", said)
    assert float(found.group(1)) > 1e-6
    assert run("merged", made(), engine="loop").runs[0].status == "finished"


def test_how_far_off_it_is_is_true():
    """The oracle: the model's gradient on each client's batch, and on both in one."""
    clients, model = ToyClients(sizes=(4, 4)), Centred().double()
    model.last = nn.Linear(144, 4).double()
    said = merged_batch.find_misfit(task_of("none", create_algorithm("dsgd"), model=model), clients)

    def gradient(x, y):
        plain = nn.Sequential(model)
        model.norm = nn.Identity()  # strategy 'none' takes it out
        found = functional.cross_entropy(plain(x), y)
        return found.detach(), torch.autograd.grad(found, list(model.parameters()))

    parts = [clients.batches(client, 1).steps[0] for client in (0, 1)]
    (loss_0, one), (loss_1, other) = (gradient(x, y) for x, y in parts)
    x, y = (torch.cat(same) for same in zip(*parts, strict=True))
    loss, both = gradient(x, y)
    means = [(a + b) / 2 for a, b in zip((loss_0, *one), (loss_1, *other), strict=True)]
    gaps = [
        float(((b - m).abs() / (1 + m.abs())).max())
        for b, m in zip((loss, *both), means, strict=True)
    ]
    assert f"is off by {max(gaps):.1e}" in said


@pytest.mark.parametrize("made", [Own, Rolled, Scaled])
def test_a_model_for_which_merged_batches_are_exact_runs(made):
    ours, expected = (run("merged", made(), engine=e).runs[0] for e in ("merged", "loop"))
    assert ours.status == "finished"
    assert ours.final.loss == pytest.approx(expected.final.loss, rel=1e-5)


@pytest.mark.parametrize("name", ["stacked", "barrier"])
def test_a_model_for_which_the_others_are_exact_runs(name):
    ours = run(name, Own()).runs[0]
    expected = run(name, Own(), engine="loop").runs[0]
    assert ours.final.loss == pytest.approx(expected.final.loss, rel=1e-5)


def test_what_fails_is_told():
    with pytest.raises(
        ConfigError, match=rf"{TRIED}it fails \(.*'\(?.*Scaled\) cannot hold several"
    ):
        run("stacked", Scaled())


class Rows(Folded):
    """Folds all rows of an image into the batch next to each other."""

    def forward(self, x):
        rows = self.norm(self.inner(x.reshape(len(x) * 8, 8))).relu()
        return self.last(rows).view(len(x), 8, -1).mean(1)


def test_batches_of_one_size_and_of_several_are_tried():
    """Rows next to each other are right where clients stand interleaved, and nowhere else."""
    task = task_of("naive", create_algorithm("dsgd"), model=Rows().double())
    assert merged_batch.find_misfit(task, ToyClients(sizes=(4, 4, 4), classes=10)) is None
    said = merged_batch.find_misfit(task, ToyClients(sizes=(4, 4, 6), classes=10))
    assert "tried on clients 0 and 2" in said
    assert merged_batch.find_misfit(task, ToyClients(sizes=(4,), classes=10)) is None


def test_a_trial_leaves_the_task_as_it_was():
    clients = ToyClients(sizes=(4, 4, 3), classes=10)
    model = Own()
    model.norm.eval()  # frozen, in the trial too
    task = task_of("naive", create_algorithm("dsgd"), model=model)
    export(task, task.initial_state)
    before = {key: value.clone() for key, value in task.model.state_dict().items()}
    exact = trial._to_double(task)
    assert {t.dtype for t in exact.initial_state.weights.values()} == {torch.float64}
    few = trial.FewClients(clients, [0, 2])
    assert "norm" not in next(rounds(exact, few, 1)).replies[0].stats
    assert merged_batch.find_misfit(task, clients) is None
    assert not task.model.training
    for key, value in task.model.state_dict().items():
        assert torch.equal(value, before[key])


def test_the_librarys_own_models_are_not_tried(monkeypatch):
    monkeypatch.setattr(merged_batch, "find_misfit", None)
    monkeypatch.setattr(barrier, "find_misfit", None)
    for name in ("merged", "barrier"):
        assert run(name, None).runs[0].status == "finished"


def test_whole_numbers_stay_whole():
    tokens = (torch.tensor([[1, 2]]), torch.tensor([0]))
    ((x, _),) = trial.take_first_steps(Batches(0, [tokens, tokens], 2), 1).steps
    assert x.dtype is torch.int64


def test_numbers_that_are_missing_or_none_are_far_off():
    one = {"a": torch.tensor([1.0, float("nan")])}
    assert trial.find_gap({"a": torch.ones(2)}, one).size == float("inf")
    assert trial.find_gap({"a": torch.ones(2), "b": torch.ones(1)}, {"a": torch.ones(2)}) == (
        trial.Gap(float("inf"), "b")
    )


def test_a_federation_is_tried_with_clients_of_all_sizes():
    data = load_dataset("digits", 0)
    parts = build_federation(data, "dirichlet_unbalanced=0.3", Plan(300), clients=6, seed=0)
    lengths = {parts.batches(client, 1).batch_sizes[0] for client in parts.all()}
    assert len(lengths) > 1
    task = task_of("naive", create_algorithm("dsgd"), model=Centred())
    assert "is off by" in merged_batch.find_misfit(task, parts)
    task = task_of("naive", create_algorithm("dsgd"), model=Own())
    assert merged_batch.find_misfit(task, parts) is None
