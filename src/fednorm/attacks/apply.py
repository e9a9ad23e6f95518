"""Who lies, about what, and how the lies get into the replies of a round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from fednorm.attacks.base import Attack, View
from fednorm.attacks.following import Following, Translation
from fednorm.core.messages import Reply, Report
from fednorm.core.moments import Moments
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
    answers: Sequence[Answer],
    adversary: Adversary | None,
    round_: int,
    *,
    survey: bool = False,
    following: Mapping[str, Following] = MappingProxyType({}),
) -> list[Answer]:
    """Return the answers of a round, or of a survey, with those of Byzantine clients falsified.

    An attack sees the answers of honest clients of the same round and nothing else. Where there is
    none, attacks that would look at them do nothing. An update is attacked together with the
    momentum that is sent along; buffers, counts and numbers of examples stay what they are.

    A lie is about running statistics. Of a layer in `following`, which says how the server's follow
    the moments that clients send, it is translated into moments; of any other it is about what is
    sent.

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
    translations = _translations(answers, following)

    def lies(client: ClientId) -> _Lies:
        rng = adversary.generator(client, round_, purpose)
        return _Lies(adversary.attack, liars, rng, translations)

    return [
        answer
        if answer.client not in adversary.clients
        else _falsified(answer, honest, adversary, lies(answer.client))
        for answer in answers
    ]


def _translations(
    answers: Sequence[Reply | Surveyed], following: Mapping[str, Following]
) -> dict[str, Translation]:
    """Return how lies about each layer are translated; the server counts as its clients do."""
    found = {}
    for path, layer in following.items():
        counters = [answer.stats[path].batches for answer in answers if path in answer.stats]
        if counters and (translation := layer.translation(max(counters))):
            found[path] = translation
    return found


@dataclass(frozen=True, slots=True)
class _Lies:
    attack: Attack
    liars: int
    rng: torch.Generator
    translations: Mapping[str, Translation]

    def tensors(self, own: Tensors, honest: Sequence[Tensors]) -> dict[str, Tensor]:
        return {
            n: self.attack.lie(t, self._view(t, [h.get(n) for h in honest])) for n, t in own.items()
        }

    def reports(
        self, own: Mapping[str, Report], honest: Sequence[Mapping[str, Report]]
    ) -> dict[str, Report]:
        return {
            path: self._report(report, [h[path] for h in honest if path in h], path)
            for path, report in own.items()
        }

    def _report(self, own: Report, honest: Sequence[Report], path: str) -> Report:
        translation = self.translations.get(path)
        first, *more = (
            self._moments(moments, [h.calls[i] for h in honest if i < len(h.calls)], translation)
            for i, moments in enumerate(own.calls)
        )
        return replace(own, moments=first, more=tuple(more))

    def _moments(
        self, own: Moments, honest: Sequence[Moments], translation: Translation | None
    ) -> Moments:
        if self.attack.omniscient and not honest:
            return own
        if translation is None:
            return self._falsify(own, honest)
        seen = [translation.to_running(moments) for moments in honest]
        lie = translation.to_moments(self._falsify(translation.to_running(own), seen))
        return replace(lie, mean=lie.mean.to(own.mean), var=lie.var.to(own.var))

    def _falsify(self, own: Moments, honest: Sequence[Moments]) -> Moments:
        mean = self._view(own.mean, [h.mean for h in honest])
        var = self._view(own.var, [h.var for h in honest])
        return replace(
            own,
            mean=self.attack.lie(own.mean, mean),
            # Backward means have no variance.
            var=self.attack.variance(own.var, var) if own.var.numel() else own.var,
        )

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
