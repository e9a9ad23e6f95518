"""Which engine makes a run: the one that is asked for, or the fastest that is exact."""

from typing import get_args

import pytest
from torch import nn

from fednorm.algorithms import create_algorithm
from fednorm.engines import ENGINES, choose, stacked
from fednorm.engines.base import EngineRun
from fednorm.errors import ConfigError
from fednorm.experiment.prepare import prepare
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.schema.load import build_experiment
from support import ToyClients, task_of, why_not

STEPS = {"algorithm": "fedavg", "local_steps": 2}
LOSSY = {"client_dropout": 0.1}


def prepare_run(model=None, **settings):
    values = {"rounds": 2, "seeds": 1, "clients": 4, "batch_size": 8, "partition": "iid"}
    experiment = build_experiment({**values, **settings})
    return prepare(experiment, experiment.strategies[0], 0, model)


def own_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


def test_every_engine_of_the_schema_is_registered_by_its_name():
    known = get_args(Experiment.model_fields["engine"].annotation)
    assert {"auto", *ENGINES} == set(known)
    assert all(engine.name == name for name, engine in ENGINES.items())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"strategies": ["naive"]}, "merged"),
        ({"strategies": ["naive"], **LOSSY}, "stacked"),
        ({"strategies": ["naive"], "diagnose": True}, "loop"),
        ({"strategies": ["fedbn"]}, "stacked"),
        ({"strategies": ["naive"], **STEPS}, "stacked"),
        ({"strategies": ["switchnorm"], **STEPS}, "loop"),
        ({"strategies": ["fedtan"]}, "merged"),
        ({"strategies": ["fedtan"], **STEPS}, "barrier"),
        ({"strategies": ["centralized"]}, "loop"),
        ({"strategies": ["naive"], "clients": 1, **STEPS}, "loop"),
    ],
)
def test_auto_takes_the_fastest_engine_that_is_exact(settings, expected):
    assert prepare_run(**settings).engine.name == expected


@pytest.mark.parametrize(("strategy", "expected"), [("naive", "stacked"), ("fedtan", "loop")])
def test_a_users_model_is_neither_merged_nor_threaded_by_itself(strategy, expected):
    assert prepare_run(own_model(), strategies=[strategy]).engine.name == expected


def test_a_large_model_trains_client_by_client_except_for_exchanges(monkeypatch):
    monkeypatch.setattr(stacked, "_SMALL", 0)
    assert prepare_run(strategies=["naive"]).engine.name == "loop"
    assert prepare_run(strategies=["fedtan"]).engine.name == "merged"


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ({"strategies": ["naive"], **LOSSY}, "clients that all are honest and answer"),
        ({"strategies": ["naive"], **STEPS}, r"one step per round \(dsgd\)"),
        (
            {"strategies": ["fedbn"], **STEPS},
            r"a strategy .* batches, one step per round \(dsgd\), no personal tensors",
        ),
        ({"strategies": ["naive"], "participation": 0.5}, "all clients in every round if .*"),
    ],
)
def test_a_refusal_names_the_needs_that_are_not_met_and_no_other(settings, needs):
    message = f"engine 'merged' needs {needs}; choose engine 'auto' or 'loop'.$"
    with pytest.raises(ConfigError, match=message):
        prepare_run(engine="merged", **settings)


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_the_error_is_the_reason_of_the_engine(name):
    task = task_of("naive", prepare_run(**STEPS).task.algorithm)
    run = EngineRun(task, ToyClients(), 2, engine=name)
    if reason := ENGINES[name].why_not(run):
        with pytest.raises(ValueError, match="engine") as refused:
            choose(run)
        assert str(refused.value) == f"{reason}; choose engine 'auto' or 'loop'."
    else:
        assert choose(run) is ENGINES[name]


def test_merged_is_not_chosen_where_it_may_not_be_exact():
    own = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    experiment = build_experiment({"strategies": ["fbn"], "rounds": 3, "clients": 3})
    engines = [
        prepare(experiment, experiment.strategies[0], 0, model).engine.name for model in (None, own)
    ]
    assert engines[0] == "merged"
    assert engines[1] != "merged"
    random = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.RReLU())
    prepared = prepare(experiment, experiment.strategies[0], 0)
    assert why_not(
        "merged",
        task_of("fbn", create_algorithm("dsgd", lr=0.05), model=random),
        prepared.federation,
        ours=True,
    )
