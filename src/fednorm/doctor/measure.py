"""Measures the clients of a federation, without training, at the initial weights."""

from dataclasses import replace

import torch

from fednorm.core.task import Task
from fednorm.data import Dataset
from fednorm.data.federation import Federation, federation
from fednorm.doctor.client_shift import distances
from fednorm.doctor.costs import REFUSALS, Patient, reason
from fednorm.doctor.findings import Clients
from fednorm.doctor.fixed_batches import Drawn, deal_again, draw
from fednorm.doctor.gradients import GRADIENT, gradients, without_dropout
from fednorm.experiment.config import Experiment
from fednorm.strategies.naive import Naive

LEAST = 2  # clients, for a distance


def measure(patient: Patient, data: Dataset, batches: int, *, samples: int = 1) -> Clients:
    """Return how far the clients are apart, and what that does to gradients.

    Clients with a batch of fewer than `samples` are left out.
    """
    experiment = patient.experiment
    everyone = _federation(experiment, data)
    smallest = {c: min(everyone.plan.lengths(len(everyone.parts[c]))) for c in everyone.all()}
    left_out = tuple(client for client, size in smallest.items() if size < samples)
    clients = Clients(
        data=data.name,
        partition=experiment.partition,
        clients=len(smallest),
        batches=batches,
        left_out=left_out,
        unmeasured=None,
    )
    if (enough := len(smallest) - len(left_out)) < LEAST:
        why = (
            f"{enough} clients have batches of at least {samples} samples, and {LEAST} are needed."
        )
        return replace(clients, unmeasured=why)
    drawn = draw(everyone, batches)
    kept = Drawn({client: own for client, own in drawn.steps.items() if client not in left_out})
    try:
        return _measured(patient, clients, kept)
    except REFUSALS as error:
        return replace(clients, unmeasured=reason(error))


def _federation(experiment: Experiment, data: Dataset) -> Federation:
    return federation(
        data,
        experiment.partition,
        experiment.plan,
        clients=experiment.clients,
        seed=experiment.seeds[0],
        participation=experiment.participation,
        unseen=experiment.unseen,
    )


def _measured(patient: Patient, clients: Clients, drawn: Drawn) -> Clients:
    seed = patient.experiment.seeds[0]
    quiet = replace(patient, model=without_dropout(patient.model))
    alike = deal_again(drawn, seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # for what is random in a model beside its dropout layers
        task = Task.build(quiet.model, Naive(), GRADIENT)
        return replace(
            clients,
            layers=distances(task, drawn, alike),
            gradients=gradients(quiet, drawn, alike),
        )
