"""Defects that a review of this library found, each as a test that they stay mended."""

import pytest
import torch
from torch import nn

import fednorm
from fednorm import create_strategy
from fednorm.algorithms import create_algorithm
from fednorm.core.messages import LayerStats, Reply, RunningStats
from fednorm.core.moments import Moments
from fednorm.core.validation import ReplySchema, find_fault
from fednorm.engines import loop, merged_batch
from fednorm.engines.evaluation import calibrate_for_test
from fednorm.errors import ConfigError
from fednorm.experiment.load import build_experiment, override_settings
from fednorm.experiment.prepare import prepare
from support import ToyClients, last, nested_model, task_of, why_not

STEP = create_algorithm("dsgd", lr=0.05)
QUICK = {"rounds": 3, "clients": 3}


def small(width=8):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width), nn.Linear(width, 10)
    )


def test_a_folder_never_answers_for_another_model(tmp_path):
    results = [
        fednorm.compare(["fbn"], model=small(w), out=tmp_path, seeds=1, **QUICK).runs[0].final.loss
        for w in (8, 12)
    ]
    assert results[0] != results[1]


def test_the_users_model_is_not_cast():
    model = small()
    fednorm.simulate("fbn", model=model, dtype="float64", **QUICK)
    assert model[1].weight.dtype is torch.float32


@pytest.mark.parametrize("name", ["hbn", "heterofl"])
def test_surveys_have_randomness_of_their_own(name):
    model = nn.Sequential(
        nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)
    ).double()
    variances = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = torch.rand(2)
        torch.manual_seed(seed)
        task = task_of(name, STEP, model=model)
        result = last(task, ToyClients(), 2)
        variances.append(calibrate_for_test(task, result.state, {}, ToyClients()).running["3"].var)
        assert torch.equal(torch.rand(2), expected)
    assert torch.equal(*variances)


def test_an_unknown_text_for_momentum_is_refused():
    for text in ("none", "0.5", "fast"):
        with pytest.raises(ValueError, match="momentum must be"):
            create_strategy("fbn", stats_momentum=text)
    wrapped = create_strategy("fedfn", base="fbn", options={"stats_momentum": "none"})
    assert wrapped.convert(nested_model()).model.stem[1].momentum is None


def test_labels_that_would_share_a_folder_are_refused():
    entries = [{"name": "fbn", "label": label} for label in ("a/b", "A b")]
    with pytest.raises(ConfigError, match="give each its own label"):
        build_experiment({"strategies": entries})


def test_adaptation_to_a_batch_of_one_is_refused_before_training():
    with pytest.raises(ConfigError, match="would adapt to a batch of 1 sample"):
        fednorm.simulate("fbn", batch_size=1, adapt_statistics=0.5, **QUICK)
    assert fednorm.simulate("fbn", batch_size=1, **QUICK).status == "finished"


def test_lockstep_is_left_alone_where_it_cannot_be_sure():
    experiment = build_experiment({"strategies": ["fbn"], **QUICK})
    engines = [
        prepare(experiment, experiment.strategies[0], 0, model).engine for model in (None, small())
    ]
    assert engines[0] == "merged"
    assert engines[1] != "merged"
    random = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.RReLU())
    prepared = prepare(experiment, experiment.strategies[0], 0)
    assert why_not("merged", task_of("fbn", STEP, model=random), prepared.federation, ours=True)


def test_both_engines_report_the_same_training_loss():
    clients = ToyClients(sizes=(2, 7, 3))
    loop = last(task_of("fbn", STEP), clients, 1)
    *_, locked = merged_batch.rounds(task_of("fbn", STEP), clients, 1)
    assert locked.train_loss == pytest.approx(loop.train_loss)


def test_a_shared_message_of_fedtan_survives_data_far_from_zero():
    class Far(nn.Module):
        def forward(self, x):
            return x.flatten(1) + 1e3

    model = nn.Sequential(Far(), nn.BatchNorm1d(64), nn.Linear(64, 4))

    class Single(ToyClients):
        def _batch(self, client, generator):
            x, y = super()._batch(client, generator)
            return x.float(), y

    task = task_of("fedtan", STEP, model=model, shared_message=True)
    assert last(task, Single(), 2).state.round == 2


@pytest.mark.parametrize("count", [float("inf"), float("nan"), -1.0])
def test_an_impossible_count_is_rejected(count):
    report = LayerStats(Moments(count, torch.zeros(1), torch.ones(1)), 1)
    expected = ReplySchema({}, running={"x": RunningStats(torch.zeros(1), torch.ones(1), 0)})
    assert "count of layer 'x'" in find_fault(Reply(0, 1, {}, {}, {"x": report}), expected)[1]


def test_a_buffer_that_is_not_finite_is_rejected():
    expected = ReplySchema({}, buffers={"level": torch.tensor(0.0)})
    reply = Reply(0, 1, {}, {"level": torch.tensor(float("nan"))}, {})
    assert find_fault(reply, expected) == ("level", "the update of 'level' is not finite")


@pytest.mark.parametrize("seeds", [[0, 0], [-1, 2]])
def test_seeds_are_different_and_not_negative(seeds):
    with pytest.raises(ConfigError, match="seeds must be different and not negative"):
        build_experiment({"seeds": seeds})


def test_odd_tables_get_a_message():
    with pytest.raises(ConfigError, match="rounds is not a table"):
        override_settings({"rounds": 5}, ["rounds.x=3"])
    with pytest.raises(ConfigError, match=r"strategy\.name is a field of none"):
        build_experiment({"strategy": {"name": "fbn"}})


def test_half_of_one_round_is_one_round():
    result = last(task_of("fixbn", STEP, count=1), ToyClients(), 1)
    assert {r.num_batches for r in result.state.running.values()} == {1}


def test_earlier_rounds_keep_their_memories():
    first, second = loop.rounds(task_of("fedbn", STEP), ToyClients(), 2)
    key = "stem.1.running_mean"
    assert not torch.equal(
        first.client_states[0].tensors[key], second.client_states[0].tensors[key]
    )
