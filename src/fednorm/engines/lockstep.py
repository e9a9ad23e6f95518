"""One-step rounds: one forward and backward pass for all clients.

When every client takes one step from the same weights, and the server takes a weighted mean, the
clients can stand in one batch: the gradient of its mean loss is the mean of their gradients, and
pooled moments are the moments of the whole. Only a layer that normalises by each client's own
batch must know where one client ends and the next begins.

Equal to the loop within rounding. Where it does not apply, `fits` says so. It cannot see whether a
model treats each sample by itself: `find_misfit` tries.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fednorm.algorithms.dsgd import DSGD
from fednorm.core.aggregator import weighted_mean
from fednorm.core.combine import combined
from fednorm.core.messages import Batches, Memory
from fednorm.core.round import NonFiniteLossError, broadcast, client_round
from fednorm.core.task import Task
from fednorm.core.types import ClientId
from fednorm.data.federation import Federation, interleave_batches
from fednorm.engines import trial
from fednorm.engines.centralized import Merged, merged
from fednorm.engines.clients import Clients
from fednorm.engines.conditions import USUAL, Conditions
from fednorm.engines.simulate import Round, Start
from fednorm.engines.simulate import rounds as rounds_in_turn
from fednorm.nn import rules

_RANDOM = (_DropoutNd, nn.RReLU)


def fits(task: Task, clients: Federation, conditions: Conditions = USUAL) -> bool:
    """Return whether a run can be made in lockstep.

    It cannot where clients lie or vanish, or where a robust rule looks at each of them: lockstep
    has one reply of all clients together.
    """
    aggregators = (task.aggregate, task.aggregate_statistics)
    momentum = isinstance(task.algorithm, DSGD) and task.algorithm.momentum > 0
    return (
        task.strategy.lockstep
        and conditions.usual
        and isinstance(task.algorithm, DSGD)
        and all(aggregator is weighted_mean for aggregator in aggregators)
        and not task.layout.personal
        and not task.clips  # a mean of clipped gradients is not the clipped mean
        and not task.layout.buffers  # each client would change them by itself
        and not is_random(task.model)  # each its own draws
        and task.loss is nn.functional.cross_entropy  # a mean over samples
        # The mean of the clients' momenta follows the mean gradient only if nobody is ever absent.
        and not (momentum and clients.participation < 1)
        and not clients.data.segmentation  # a mean over pixels that have a label
        and _statistics_fit(task)
    )


def find_misfit(task: Task, clients: Clients) -> str:
    """Return why lockstep does not train a model as the loop does, or nothing; by trying two.

    Clients with batches of one size stand otherwise in the batch of all than others do, so that
    both are tried where there are both.
    """
    alike: dict[int, list[ClientId]] = {}
    for client in clients.all():
        length = _with_length(clients.batches(client, 1)).lengths[0]
        alike.setdefault(length, []).append(client)
    of_one_size = next((group[:2] for group in alike.values() if len(group) > 1), [])
    of_two_sizes = [group[0] for group in alike.values()][:2]
    for pair in (pair for pair in (of_one_size, of_two_sizes) if len(pair) > 1):
        compare = partial(_compare, trial.Few(clients, pair))
        if found := trial.find_misfit("lockstep", pair, task, compare):
            return found
    return ""


def _compare(clients: Clients, task: Task) -> trial.Gap:
    alone, together = next(rounds_in_turn(task, clients, 1)), next(rounds(task, clients, 1))
    return trial.find_gap(_numbers(alone), _numbers(together))


def _numbers(result: Round) -> dict[str, Tensor]:
    updates, examples = [r.update for r in result.replies], [r.examples for r in result.replies]
    update = combined(updates, examples, weighted_mean)
    return trial.numbers_of_round(update, result.state.running, result.train_loss)


def is_random(model: nn.Module) -> bool:
    """Return whether a model draws random numbers when it trains."""
    return any(isinstance(module, _RANDOM) for module in model.modules())


def _statistics_fit(task: Task) -> bool:
    """Moments of the whole are pooled moments; an average needs each client's own."""
    if task.strategy.statistics == "pool" or not task.layout.sharing:
        return True
    return task.strategy.rule(broadcast(task, task.initial_state)) is rules.batch


class Together(Merged):
    """All clients of a round as one, in a batch that knows whose samples are whose."""

    def batches(self, client: ClientId, round_: int) -> Batches:  # noqa: ARG002 (protocol)
        """Return the batches of all clients that take part, side by side."""
        drawn = [self.clients.batches(c, round_) for c in self.clients.participants(round_)]
        parts = [_with_length(part) for part in drawn]
        steps, sizes = [part.steps for part in parts], tuple(part.lengths[0] for part in parts)
        if len(set(sizes)) == 1:
            step = next(interleave_batches(steps))
        else:
            only = [next(iter(own)) for own in steps]
            step = torch.cat([x for x, _ in only]), torch.cat([y for _, y in only])
        return replace(merged(parts), steps=[step], sizes=sizes if len(parts) > 1 else ())


def _with_length(part: Batches) -> Batches:
    """Return a client's batches with known lengths; where they are not, the first is looked at."""
    if part.lengths:
        return part
    first = next(iter(part.steps))
    return replace(part, steps=[first], lengths=(len(first[1]),))


def rounds(task: Task, clients: Clients, count: int, start: Start | None = None) -> Iterator[Round]:
    """Run federated rounds in lockstep, up to round `count`."""
    state = start.state if start else task.initial_state
    try:
        for result in rounds_in_turn(task, Together(clients), count, start):
            state = result.state
            yield result
    except NonFiniteLossError:
        received = broadcast(task, state)
        for client in clients.participants(received.round):  # to say whose loss it was
            client_round(task, received, Memory(), clients.batches(client, received.round))
        raise
