"""`clip_norm` against torch's own clipping, in both algorithms, and in every engine."""

import pytest
import torch

from fednorm.algorithms import create_algorithm
from fednorm.algorithms.base import clip_gradients
from fednorm.core.messages import ClientState
from fednorm.core.round import broadcast, client_round
from fednorm.engines import stacked
from fednorm.engines.loop import rounds
from support import ToyClients, nested_model, task_of, why_not

LIMIT = 0.3
CLIENTS = ToyClients(sizes=(4, 4, 6), steps=3)


def loss_of(model, x, y):
    return torch.nn.functional.cross_entropy(model(x), y)


@pytest.mark.slow
def test_local_steps_are_those_of_torch():
    task = task_of("naive", create_algorithm("fedavg", lr=0.1, momentum=0.9, clip_norm=LIMIT))
    own = CLIENTS.batches(0, 1)
    reply, _ = client_round(task, broadcast(task, task.initial_state), ClientState(), own)
    model = nested_model().train()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms = []
    for x, y in own.steps:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)))
        optimizer.step()
    assert max(norms) > LIMIT  # or nothing would be tested
    for name, p in model.named_parameters():
        torch.testing.assert_close(reply.update[name], p.detach() - start[name], rtol=0, atol=1e-6)


def test_a_single_step_sends_the_clipped_gradient():
    clients = ToyClients(sizes=(4,))
    for limit, shorter in ((LIMIT, True), (1e6, False)):
        task = task_of("naive", create_algorithm("dsgd", clip_norm=limit))
        sent = broadcast(task, task.initial_state)
        reply, _ = client_round(task, sent, ClientState(), clients.batches(0, 1))
        plain_task = task_of("naive", create_algorithm("dsgd"))
        plain, _ = client_round(plain_task, sent, ClientState(), clients.batches(0, 1))
        norm = torch.cat([g.flatten() for g in plain.update.values()]).norm()
        assert (norm > limit) == shorter
        for name, gradient in plain.update.items():
            expected = gradient * (limit / norm) if shorter else gradient
            torch.testing.assert_close(reply.update[name], expected, rtol=1e-12, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["naive", "fbn", "dualbn", "gn", "fedbn"])
def test_stacked_clients_have_their_own_norms(name):
    algorithm = create_algorithm("fedavg", lr=0.1, clip_norm=LIMIT)
    made = [task_of(name, algorithm, count=2) for _ in range(2)]
    trainer = stacked.StackedTrainer(made[1], 4)
    alone = list(rounds(made[0], CLIENTS, 2))
    together = list(rounds(made[1], CLIENTS, 2, train=trainer.train))
    for name_, value in alone[-1].state.weights.items():
        found = together[-1].state.weights[name_]
        torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-11)


def test_merged_batches_are_refused():
    task = task_of("naive", create_algorithm("dsgd", clip_norm=LIMIT))
    assert "no clipped gradients" in why_not("merged", task, ToyClients())
    assert why_not("merged", task_of("naive", create_algorithm("dsgd")), ToyClients()) is None


def test_a_gradient_of_zeros_stays():
    (zero,) = clip_gradients([torch.zeros(3)], LIMIT)
    assert torch.equal(zero, torch.zeros(3))
    with pytest.raises(ValueError, match="clip_norm must be 0 or more and finite, not -1"):
        create_algorithm("fedavg", clip_norm=-1)
