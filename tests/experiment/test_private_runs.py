"""Private runs as users make them: unequal clients, sampling, local epochs, resume, refusals."""

import json
import logging
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from opacus.accountants import RDPAccountant
from typer.testing import CliRunner

import fednorm
from fednorm.cli import app
from fednorm.data.sampling import draw_participants
from fednorm.errors import ConfigError
from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.job import CheckpointPolicy
from fednorm.experiment.prepare import find_exposure, prepare
from fednorm.experiment.results import RunResult
from fednorm.experiment.run import Monitor
from fednorm.experiment.schema.load import build_experiment, override_settings

PRIVATE = {
    "clip": 1.0,
    "noise": 0.8,
    "noise_statistics": 2.0,
    "clip_statistics": 3.0,
    "delta": 1e-3,
}
USUAL = {
    "partition": "dirichlet_unbalanced=0.5",
    "clients": 20,
    "participation": 0.3,
    "algorithm": {"name": "fedavg", "lr": 0.1},
    "local_epochs": 2,
    "rounds": 6,
    "eval_every": 3,
    "privacy": PRIVATE,
}


def epsilon_by_hand(rounds, *, statistics):
    accountant = RDPAccountant()
    sigma = (0.8**-2 + 2.0**-2) ** -0.5 if statistics else 0.8
    for _ in range(rounds):
        accountant.step(noise_multiplier=sigma, sample_rate=0.3)
    return accountant.get_epsilon(1e-3)


@pytest.mark.slow
def test_private_runs_as_users_make_them(tmp_path):
    """Float32, unequal clients, participation, local epochs, evaluation, export and reload."""
    result = fednorm.compare(["centralized", "fbn", "naive", "gn"], seeds=1, out=tmp_path, **USUAL)
    assert [run.status for run in result.runs] == ["finished"] * 4
    by_name = {run.strategy: run for run in result.runs}
    assert by_name["centralized"].epsilon is None is by_name["centralized"].delta
    for name, statistics in {"fbn": True, "naive": True, "gn": False}.items():
        run = by_name[name]
        assert run.epsilon == pytest.approx(epsilon_by_hand(6, statistics=statistics), rel=1e-3)
        assert all(math.isnan(e.train_loss) for e in run.history)
        assert (run.rejected, run.dropped_out, run.retries) == (0, 0, 0)
    folder = tmp_path / "runs" / "fbn-seed0"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["train_loss"] for line in lines] == [None] * 6
    x = torch.rand(5, 1, 8, 8)
    assert torch.equal(fednorm.load(folder)(x), by_name["fbn"].model()(x))
    again = fednorm.compare(["centralized", "fbn", "naive", "gn"], seeds=1, out=tmp_path, **USUAL)
    assert [run.epsilon for run in again.runs] == [run.epsilon for run in result.runs]
    read = RunResult.from_json(json.loads((folder / "run.json").read_text())["result"])
    assert (read.epsilon, read.delta) == (by_name["fbn"].epsilon, 1e-3)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_noise(tmp_path):
    """Stopped after round 3, and resumed: the same weights, bit by bit, and the same ε."""
    experiment = build_experiment({**USUAL, "strategies": ["fbn"], "seeds": [0]})

    class Third:
        seen = 0

        def is_set(self):
            self.seen += 1
            return self.seen == 3

    whole = run_comparison(experiment, folder=tmp_path / "whole").runs[0]
    stopped = run_comparison(
        experiment,
        folder=tmp_path / "parts",
        monitor=Monitor(stop=Third()),
        saving=CheckpointPolicy(every=1),
    ).runs[0]
    assert (stopped.status, stopped.rounds) == ("interrupted", 3)
    assert stopped.epsilon == pytest.approx(epsilon_by_hand(3, statistics=True), rel=1e-3)
    resumed = run_comparison(experiment, folder=tmp_path / "parts").runs[0]
    assert (resumed.status, resumed.epsilon) == ("finished", whole.epsilon)
    ours, theirs = (run.model().state_dict() for run in (resumed, whole))
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


@pytest.mark.slow
def test_stacked_clients_give_the_same():
    settings = {**USUAL, "rounds": 2, "dtype": "float64", "partition": "gamma=0.5"}
    found, exact = (
        fednorm.simulate("fbn", engine=name, **settings).model().state_dict()
        for name in ("stacked", "loop")
    )
    for name, value in exact.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)


def test_merged_batches_are_refused():
    with pytest.raises(ConfigError, match="no privacy, which clips each client's update"):
        fednorm.simulate("fbn", engine="merged", rounds=1, privacy={**PRIVATE, "noise": 1.0})


@pytest.mark.slow
def test_rounds_without_a_client_are_noise():
    """One client is expected: the first round has none, the third two, and none is repeated."""
    settings = {"clients": 4, "participation": 0.25, "rounds": 3}
    drawn = [draw_participants(4, 0.25, seed=1, round_=r, independent=True) for r in (1, 2, 3)]
    assert drawn == [[], [0], [0, 1]]
    run = fednorm.simulate("fbn", seed=1, **{**USUAL, **settings})
    assert (run.status, run.rounds, run.retries) == ("finished", 3, 0)
    assert run.bytes_up_per_round == fednorm.simulate("fbn", **USUAL).bytes_up_per_round


@pytest.mark.slow
def test_runs_draw_their_clients_independently_and_have_their_own_noise():
    """With the same noise in two runs their difference would be that of the clients' sums."""
    values = {**USUAL, "strategies": ["fbn", "naive"]}
    found = []
    for changes in ({}, {"rounds": 7}, {"privacy": {**PRIVATE, "noise": 1.6}}, {"engine": "loop"}):
        experiment = build_experiment({**values, **changes})
        for entry in experiment.strategies:
            for seed in (0, 1):
                made = prepare(experiment, entry, seed)
                assert made.federation.independent
                found.append(made.task.privacy.seed)
    assert len(set(found[:12])) == 12
    assert found[12:] == found[:4]  # another engine gives the same result
    plain = build_experiment({**values, "privacy": None})
    assert not prepare(plain, plain.strategies[0], 0).federation.independent


def test_who_drops_out_is_not_told(tmp_path):
    """Nor is a round repeated, though no client is left in some."""
    settings = {**USUAL, "clients": 4, "rounds": 4, "client_dropout": 0.9}
    (run,) = fednorm.compare(["gn"], seeds=1, out=tmp_path, **settings).runs
    assert (run.status, run.dropped_out, run.retries) == ("finished", 0, 0)
    text = (tmp_path / "runs" / "gn-seed0" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(lines) == 4
    assert not any({"dropped_out", "retries", "rejected"} & line.keys() for line in lines)


def test_a_run_that_ends_in_a_round_pays_for_it():
    private = {**PRIVATE, "clip": 3e38, "noise": 20.0}
    run = fednorm.simulate("gn", **{**USUAL, "privacy": private})
    assert (run.status, run.rounds) == ("diverged", 0)
    assert run.epsilon > 0


def test_clients_are_drawn_independently():
    """Poisson sampling: numbers vary as a binomial does, pairs are independent."""
    draws = np.zeros((4000, 12))
    for round_ in range(4000):
        draws[round_, draw_participants(12, 0.3, seed=5, round_=round_, independent=True)] = 1
    assert draws.mean(0) == pytest.approx(np.full(12, 0.3), abs=0.03)
    assert draws.sum(1).var() == pytest.approx(12 * 0.3 * 0.7, rel=0.1)
    assert np.corrcoef(draws[:, 0], draws[:, 1])[0, 1] == pytest.approx(0, abs=0.05)
    fixed = [len(draw_participants(12, 0.3, seed=5, round_=r)) for r in range(20)]
    assert set(fixed) == {4}
    assert draw_participants(3, 1.0, seed=0, round_=1, independent=True) == [0, 1, 2]


@pytest.mark.slow
def test_a_client_that_diverges_does_not_end_a_private_run():
    huge = {"name": "fedavg", "lr": 1e20}
    settings = {**USUAL, "algorithm": huge, "rounds": 2, "eval_every": 2}
    assert fednorm.simulate("gn", **settings).status == "finished"
    plain = {key: value for key, value in settings.items() if key != "privacy"}
    assert fednorm.simulate("gn", **plain).status == "diverged"


REFUSED = [
    ({"engine": "flower"}, "engine 'flower' is refused: nodes get the seed"),
    ({"aggregator": "median"}, "aggregator must be 'mean'"),
    ({"statistics_aggregator": "median"}, "statistics_aggregator must be 'mean'"),
    ({"byzantine": 2, "attack": "alie"}, "attack = 'alie' is refused"),
    ({"rollback": True}, "rollback = True is refused"),
    ({"diagnose": True}, "diagnose = True is refused: it publishes statistics"),
    ({"adapt_statistics": 0.5}, "adapt_statistics = 0.5 is refused: it tests on the clients' data"),
    ({"unseen_clients": 2}, "unseen_clients = 2 is refused"),
    ({"evaluate": "clients"}, "evaluate = 'clients' is refused"),
    ({"min_replies": 2}, "min_replies must be 1"),
    ({"participation": 0.01}, "at least one client must be expected in a round"),
    ({"privacy": {**PRIVATE, "delta": 0.1}}, "delta must be below 1/20"),
    ({"privacy": {"clip": 1.0}}, "privacy.noise"),
    ({"privacy": {**PRIVATE, "clip": 0.0}}, "privacy.clip = 0.0 is not valid"),
    ({"privacy": {**PRIVATE, "noise": math.inf}}, "privacy.noise = inf is not valid"),
    ({"privacy": {**PRIVATE, "sigma": 1.0}}, "unknown key of the table [privacy] 'sigma'"),
    (
        {"strategies": [{"name": "fbn", "privacy": {**PRIVATE, "delt": 1.0}}]},
        "unknown key of the table [privacy] 'delt'; did you mean 'delta'? Known: clip,",
    ),
    ({"strategies": [{"name": "fbn", "privacy": {"clip": 1.0}}]}, "privacy.noise"),
    ({"sweep": {"privacy.nois": [1, 2]}}, "unknown key of the table [privacy] 'nois'"),
    ({"tune": {"lr": [0.1, 0.2]}}, "tune does not go with the privacy of 'fbn'"),
    (
        {
            "privacy": None,
            "tune": {"lr": [0.1, 0.2]},
            "strategies": ["naive", {"name": "fbn", "privacy": PRIVATE}],
        },
        "tune does not go with the privacy of 'fbn'",
    ),
    ({"privacy": None, "tune": {"privacy.noise": [1, 2]}}, "tune does not go with the privacy"),
]


@pytest.mark.parametrize(("settings", "reason"), REFUSED)
def test_what_would_void_the_guarantee_is_refused(settings, reason):
    with pytest.raises(ConfigError) as error:
        build_experiment({**USUAL, "strategies": ["fbn"], **settings})
    assert reason in str(error.value)


@pytest.mark.parametrize("name", ["fedbn", "silobn"])
def test_tests_of_personal_models_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name}: with privacy it cannot be tested"):
        fednorm.simulate(name, **USUAL)


def test_strategies_are_refused_by_name():
    with pytest.raises(ConfigError, match="heterofl: privacy cannot be kept: HeteroFL measures"):
        fednorm.simulate("heterofl", **USUAL)


def test_a_task_has_the_public_numbers_of_its_experiment():
    experiment = build_experiment({**USUAL, "strategies": ["fbn"]})
    task = prepare(experiment, experiment.strategies[0], 3).task
    known = fednorm.Privacy(**PRIVATE, clients=6.0, rate=0.3, batches=2)
    assert replace(task.privacy, seed=0) == known
    other = experiment.model_copy(update={"local_epochs": None, "local_steps": 7})
    assert prepare(other, other.strategies[0], 0).task.privacy.batches == 7
    on_nodes = experiment.model_copy(update={"engine": "flower"})  # as a submission makes it
    with pytest.raises(ConfigError, match="engine 'flower' is refused"):
        prepare(on_nodes, on_nodes.strategies[0], 0)


def test_an_entry_may_have_its_own_privacy():
    own = {"name": "fbn", "label": "more", "privacy": {**PRIVATE, "noise": 3.0}}
    experiment = build_experiment({**USUAL, "strategies": ["centralized", "fbn", own]})
    tables = [experiment.for_entry(entry).privacy for entry in experiment.strategies]
    assert [table and table.noise for table in tables] == [None, 0.8, 3.0]
    alone = build_experiment({"strategies": [own], "clients": 20})
    assert alone.privacy is None
    assert alone.for_entry(alone.strategies[0]).privacy.noise == 3.0


def test_the_command_line_sets_single_fields():
    values = override_settings({"clients": 30}, ["privacy.clip=2", "privacy.noise=1.5"])
    assert build_experiment(values).privacy.model_dump(exclude_none=True) == {
        "clip": 2.0,
        "noise": 1.5,
        "clip_statistics": 1.0,
        "delta": 1e-5,
    }


@pytest.mark.slow
def test_table_page_and_file_show_epsilon(tmp_path):
    options = ["--strategies", "centralized,gn", "--clients", "20", "--rounds", "2", "--seeds", "1"]
    private = ["--set", "privacy.clip=1", "--set", "privacy.noise=1.0"]
    done = CliRunner().invoke(
        app, ["compare", *options, *private, "--workers", "1", "--out", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "results.json").read_text())
    epsilons = {run["strategy"]: run["epsilon"] for run in content["runs"]}
    assert epsilons["centralized"] is None
    assert epsilons["gn"] > 0
    shown = f"{epsilons['gn']:.3g}"
    page = (tmp_path / "report.html").read_text()
    for text in (done.output, page):
        assert "ε" in text
        assert shown in text
        assert "at δ = 1e-05" in " ".join(text.split())


@pytest.mark.parametrize(
    ("settings", "samples"),
    [
        ({"batch_size": 1}, 1),
        ({"batch_size": 3, "local_steps": 2}, 6),
        ({"batch_size": 8}, None),
        ({"batch_size": 1, "local_epochs": 1}, None),
        ({"batch_size": 1, "privacy": {"clip": 1.0, "noise": 1.0}}, None),
        ({"batch_size": 1, "privacy": {"clip": 1.0, "noise": 1.0, "noise_statistics": 0.0}}, 1),
        ({"batch_size": 1, "strategies": ["gn"]}, None),
        ({"batch_size": 1, "secure": True}, None),
    ],
)
def test_statistics_of_few_samples_are_told(settings, samples):
    common = {"strategies": ["fbn"], "clients": 5, "algorithm": {"name": "fedavg", "lr": 0.01}}
    experiment = build_experiment({**common, **settings})
    found = find_exposure(prepare(experiment, experiment.strategies[0], 0))
    if samples is None:
        assert found is None
    else:
        assert f"client 0 shares statistics of {samples} samples in a round" in found


def test_a_comparison_warns_of_them_once(caplog):
    with caplog.at_level(logging.WARNING, logger="fednorm"):
        fednorm.compare(["gn", "fbn", "dualbn"], rounds=1, seeds=1, clients=5, batch_size=1)
    warned = [r.getMessage() for r in caplog.records if "shares statistics" in r.getMessage()]
    assert len(warned) == 1
    assert warned[0].startswith("fbn: client 0 shares statistics of 1 samples in a round")
