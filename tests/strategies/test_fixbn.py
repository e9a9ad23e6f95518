"""FixBN: which parts freeze, when, and which parts continue to move."""

import copy
from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from fednorm import create_strategy
from fednorm.algorithms import create_algorithm
from fednorm.core.layout import find_kinds
from fednorm.core.messages import Broadcast, ServerState
from fednorm.core.task import Task
from fednorm.core.types import Kind
from fednorm.engines import merged_batch, stacked
from fednorm.engines.loop import rounds
from support import ToyClients, last, nested_model, task_of

STEP = create_algorithm("dsgd", lr=0.05, momentum=0.9)


def history(count=12, **fields):
    task = task_of("fixbn", STEP, count=count, **fields)
    return [task.initial_state] + [r.state for r in rounds(task, ToyClients(), count)]


def statistics(state):
    return torch.cat([t for r in state.running.values() for t in (r.mean, r.var)])


def affine(state):
    kind = find_kinds(nested_model())
    return torch.cat([t for name, t in state.weights.items() if kind[name] is Kind.AFFINE])


@pytest.mark.slow
@pytest.mark.parametrize("merge", ["average", "pool"])
@pytest.mark.parametrize(("freeze", "at"), [(0.5, 6), (4, 4), (0, 0), (0.25, 3), (1.0, 12)])
def test_statistics_are_bit_identical_after_the_freezing_round(freeze, at, merge):
    states = history(freeze_round=freeze, statistics=merge)
    for before, after in pairwise(states[: at + 1]):
        assert not torch.equal(statistics(before), statistics(after))
    for state in states[at:]:
        assert torch.equal(statistics(state), statistics(states[at]))
        assert {r.num_batches for r in state.running.values()} == {at}


@pytest.mark.slow
def test_affine_goes_on_moving_unless_it_is_frozen_too():
    moving, frozen = history(freeze_round=6), history(freeze_round=6, freeze_affine=True)
    assert not torch.equal(affine(moving[6]), affine(moving[12]))
    assert not torch.equal(affine(frozen[5]), affine(frozen[6]))
    assert torch.equal(affine(frozen[6]), affine(frozen[12]))
    weights = [name for name, t in frozen[6].weights.items() if t.dim() > 1]
    assert weights
    for name in weights:
        assert not torch.equal(frozen[6].weights[name], frozen[12].weights[name])


def fedavg_that_freezes_affine(clients, count, freeze):
    """FedAvg on plain torch models whose γ and β get no gradient after the freezing round."""
    model = nested_model()
    for round_ in range(1, count + 1):
        states, weights = [], []
        for client in clients.participants(round_):
            local = copy.deepcopy(model).train()
            for module in local.modules():
                if isinstance(module, torch.nn.BatchNorm2d):
                    module.requires_grad_(round_ <= freeze)
            learning = [p for p in local.parameters() if p.requires_grad]
            optimizer = torch.optim.SGD(learning, lr=0.05, momentum=0.9, weight_decay=1e-3)
            batches = clients.batches(client, round_)
            for x, y in batches.steps:
                optimizer.zero_grad()
                functional.cross_entropy(local(x), y).backward()
                optimizer.step()
            states.append(local.state_dict())
            weights.append(batches.examples)
        shares = [weight / sum(weights) for weight in weights]
        merged = {
            key: sum(share * state[key] for share, state in zip(shares, states, strict=True))
            for key, value in states[0].items()
            if value.is_floating_point()
        }
        model.load_state_dict({**states[0], **merged})
    return model.state_dict()


@pytest.mark.slow
def test_affine_alone_is_frozen_while_statistics_go_on_moving():
    """The paper's Table H, third row: unequal clients, local steps, a client that was away."""
    clients = ToyClients(sizes=(2, 6, 4), steps=3, absent={3: (1,)})
    local = create_algorithm("fedavg", lr=0.05, momentum=0.9, weight_decay=1e-3)
    fields = {"freeze_affine": True, "freeze_statistics": False}
    task = task_of("fixbn", local, count=6, freeze_round=0.5, **fields)
    states = [task.initial_state] + [r.state for r in rounds(task, clients, 6)]
    oracle = fedavg_that_freezes_affine(clients, 6, freeze=3)
    for name, value in states[-1].weights.items():
        torch.testing.assert_close(value, oracle[name], rtol=0, atol=1e-12)
    for path, running in states[-1].running.items():
        for kind, value in (("mean", running.mean), ("var", running.var)):
            expected = oracle[f"{path}.running_{kind}"]
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
    for before, after in pairwise(states):
        assert not torch.equal(statistics(before), statistics(after))
        assert torch.equal(affine(before), affine(after)) is (after.round > 3)


@pytest.mark.slow
@pytest.mark.parametrize("merge", ["average", "pool"])
@pytest.mark.parametrize("engine", ["merged", "stacked"])
def test_affine_alone_is_frozen_in_every_engine(engine, merge):
    fields = {"freeze_affine": True, "freeze_statistics": False, "statistics": merge}
    task = task_of("fixbn", STEP, count=4, freeze_round=2, **fields)
    clients = ToyClients(sizes=(5, 5, 5))
    expected = last(task, clients, 4).state
    if engine == "merged":
        *_, got = merged_batch.rounds(task, clients, 4)
    else:
        *_, got = rounds(task, clients, 4, train=stacked.StackedTrainer(task, 3).train)
    for one in (affine, statistics):
        torch.testing.assert_close(one(got.state), one(expected), rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_auto_may_freeze_affine_alone():
    """Frozen parameters stay frozen however much the statistics move afterwards."""
    fields = {"freeze_affine": True, "freeze_statistics": False}
    states = history(40, freeze_round="auto", window=4, threshold=1e-5, **fields)
    at = next(t for t, s in enumerate(states) if int(s.strategy_state.get("frozen", 0)))
    assert 4 <= at < 30
    for before, after in pairwise(states[at:]):
        assert torch.equal(affine(before), affine(after))
        assert not torch.equal(statistics(before), statistics(after))


def test_refuses_to_freeze_nothing():
    with pytest.raises(ValueError, match=r"freezes nothing.*use 'naive'"):
        create_strategy("fixbn", freeze_statistics=False)


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [1e-5, 2e-6, 3e-7])
def test_auto_freezes_where_the_rule_says(threshold):
    """The oracle watches an unfrozen run and applies the window rule with numpy."""
    window, count = 4, 40
    free = history(count, freeze_round=count)
    changes = [float((statistics(b) - statistics(a)).abs().mean()) for a, b in pairwise(free)]
    expected = next(
        t
        for t in range(window, count + 1)
        if torch.tensor(changes[t - window : t]).double().var(correction=0) < threshold
    )
    assert window <= expected < count
    states = history(count, freeze_round="auto", window=window, threshold=threshold)
    assert not torch.equal(statistics(states[expected - 1]), statistics(states[expected]))
    for state in states[expected:]:
        assert torch.equal(statistics(state), statistics(states[expected]))


@pytest.mark.slow
def test_the_thresholds_above_freeze_at_different_rounds():
    ends = {
        next(
            t
            for t, s in enumerate(history(40, freeze_round="auto", window=4, threshold=threshold))
            if int(s.strategy_state.get("frozen", 0))
        )
        for threshold in (1e-5, 2e-6, 3e-7)
    }
    assert len(ends) == 3


def test_stage_two_normalises_as_in_evaluation():
    """The gradient of stage II is that of the model with its BatchNorm layers in eval mode."""
    clients = ToyClients(sizes=(5,))
    task = task_of("fixbn", create_algorithm("dsgd", lr=0.05), freeze_round=0)
    after = last(task, clients, 1).state
    model = nested_model().eval()
    x, y = clients.batches(0, 1).steps[0]
    torch.nn.functional.cross_entropy(model(x), y).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            after.weights[name], parameter.detach() - 0.05 * parameter.grad, rtol=0, atol=1e-12
        )


def test_a_share_needs_the_number_of_rounds():
    task = Task.build(nested_model(), create_strategy("fixbn"), STEP)
    received = Broadcast(ServerState(0, {}, {}, {}))
    with pytest.raises(ValueError, match="number is not known"):
        task.strategy.rule(received)


@pytest.mark.parametrize("wrong", [1.5, -1, "later", True])
def test_refuses_a_freezing_round_that_is_none(wrong):
    with pytest.raises(ValueError, match="freeze_round must be"):
        create_strategy("fixbn", freeze_round=wrong)


def test_half_of_one_round_is_one_round():
    result = last(task_of("fixbn", STEP, count=1), ToyClients(), 1)
    assert {r.num_batches for r in result.state.running.values()} == {1}
