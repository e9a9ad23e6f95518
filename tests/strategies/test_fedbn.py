"""FedBN: all of a BatchNorm layer stays with the client."""

import pytest

from fednorm.algorithms import create_algorithm
from fednorm.engines.evaluation import score_clients
from strategies.personal import (
    ALGORITHMS,
    STATISTICS,
    assert_clients_differ,
    assert_is_training_with_own_tensors,
    assert_nothing_personal_is_sent,
)
from support import ToyClients, last, task_of

PERSONAL = ("weight", "bias", *STATISTICS)


@pytest.mark.parametrize("step", ALGORITHMS)
def test_no_personal_tensor_in_any_reply(step):
    assert_nothing_personal_is_sent("fedbn", step, PERSONAL)


@pytest.mark.parametrize("step", ALGORITHMS)
def test_personal_tensors_differ_between_clients(step):
    assert_clients_differ("fedbn", step, PERSONAL)


def test_is_training_with_own_tensors():
    assert_is_training_with_own_tensors("fedbn", PERSONAL)


def test_each_client_is_tested_with_its_own_layers():
    clients = ToyClients()
    task = task_of("fedbn", create_algorithm("dsgd", lr=0.1))
    result = last(task, clients, 3)
    own = score_clients(task, result.state, result.client_states, clients, range(3))
    losses = [score.loss for score in own.values()]
    swapped = {0: result.client_states[1], 1: result.client_states[0], 2: result.client_states[2]}
    others = score_clients(task, result.state, swapped, clients, range(3))
    other = [score.loss for score in others.values()]
    assert losses[0] != other[0]
    assert losses[1] != other[1]
    assert losses[2] == other[2]
