"""Who lies, about what, and how the lies get into the replies of a round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from fednorm.attacks.base import Attack, View
from fednorm.core.messages import Reply, Report
from fednorm.core.survey import Surveyed
from fednorm.core.types import ClientId, Tensors

Target: TypeAlias = Literal["updates", "statistics", "both"]
Answer = TypeVar("Answer", Reply, Surveyed)

TAG = 601


def byzantine(clients: Sequence[ClientId], count: int, seed: int) -> frozenset[ClientId]:
    """Return which clients lie: the same ones for a seed, whatever their data.

    >>> byzantine(range(10), 3, seed=0) == byzantine(range(10), 3, seed=0)
    True
    """
    chosen = np.random.default_rng([seed, TAG]).choice(len(clients), count, replace=False)
    return frozenset(clients[i] for i in chosen.tolist())


@dataclass(frozen=True, slots=True)
class Adversary:
    """Byzantine clients, their attack, and whether it is on updates, statistics or both."""

    attack: Attack
    clients: frozenset[ClientId]
    target: Target = "both"
    seed: int = 0

    def generator(self, client: ClientId, round_: int, purpose: int = 0) -> torch.Generator:
        """Return the randomness of one client in one round."""
        entropy = np.random.SeedSequence([self.seed, client, round_, TAG + 1, purpose])
        seed = int(entropy.generate_state(1, np.uint64)[0] >> np.uint64(1))
        return torch.Generator().manual_seed(seed)


def attacked(
    answers: Sequence[Answer], adversary: Adversary | None, round_: int, *, survey: bool = False
) -> list[Answer]:
    """Return the answers of a round, or of a survey, with those of Byzantine clients falsified.

    An attack sees the answers of honest clients of the same round and nothing else. Where there is
    none, attacks that would look at them do nothing. An update is attacked together with the
    momentum that is sent along; buffers, counts and numbers of examples stay what they are.

    An attack that is not omniscient can be made on the client's own machine, with its own answer
    alone; `replacement`, which counts the clients of the round, needs its scale there.
    """
    if adversary is None or adversary.attack.on_data:
        return list(answers)
    honest = [answer for answer in answers if answer.client not in adversary.clients]
    liars = len(answers) - len(honest)
    if adversary.attack.omniscient and not honest:
        return list(answers)
    purpose = 1 + survey
    return [
        answer
        if answer.client not in adversary.clients
        else _falsified(
            answer,
            honest,
            adversary,
            _Lies(adversary.attack, liars, adversary.generator(answer.client, round_, purpose)),
        )
        for answer in answers
    ]


@dataclass(frozen=True, slots=True)
class _Lies:
    attack: Attack
    liars: int
    rng: torch.Generator

    def tensors(self, own: Tensors, honest: Sequence[Tensors]) -> dict[str, Tensor]:
        return {
            n: self.attack.lie(t, self._view(t, [h.get(n) for h in honest])) for n, t in own.items()
        }

    def reports(
        self, own: Mapping[str, Report], honest: Sequence[Mapping[str, Report]]
    ) -> dict[str, Report]:
        return {
            path: self._report(report, [h[path] for h in honest if path in h])
            for path, report in own.items()
        }

    def _report(self, own: Report, honest: Sequence[Report]) -> Report:
        if self.attack.omniscient and not honest:
            return own
        old = own.moments
        mean = self._view(old.mean, [h.moments.mean for h in honest])
        var = self._view(old.var, [h.moments.var for h in honest])
        lie = replace(
            old,
            mean=self.attack.lie(old.mean, mean),
            # Backward means have no variance.
            var=self.attack.variance(old.var, var) if old.var.numel() else old.var,
        )
        return replace(own, moments=lie)

    def _view(self, own: Tensor, honest: Sequence[Tensor | None]) -> View:
        present = [tensor for tensor in honest if tensor is not None]
        stacked = torch.stack(present) if present else own.new_empty(0, *own.shape)
        return View(stacked, self.liars, self.rng)


def _falsified(own: Answer, honest: Sequence[Answer], adversary: Adversary, lies: _Lies) -> Answer:
    changed: dict[str, object] = {}
    if adversary.target != "updates":
        changed["stats"] = lies.reports(own.stats, [h.stats for h in honest])
    if isinstance(own, Reply) and adversary.target != "statistics":
        replies = [h for h in honest if isinstance(h, Reply)]
        changed["update"] = lies.tensors(own.update, [h.update for h in replies])
        changed["momentum"] = lies.tensors(own.momentum, [h.momentum for h in replies])
    return replace(own, **changed)  # type: ignore[arg-type]  # each is of its field's type
