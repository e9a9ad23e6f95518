"""The adversary: which clients are Byzantine, what they attack, and what they send instead."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from fednorm.attacks import Target
from fednorm.attacks.base import Attack, AttackContext
from fednorm.attacks.following import Following, Translation
from fednorm.core.calibration import CalibrationReply
from fednorm.core.messages import LayerStats, Reply
from fednorm.core.moments import Moments
from fednorm.core.types import ClientId, Tensors

Answer = TypeVar("Answer", Reply, CalibrationReply)

TAG = 601


def choose_byzantine(clients: Sequence[ClientId], count: int, seed: int) -> frozenset[ClientId]:
    """Return which clients lie: the same ones for a seed, whatever their data.

    >>> choose_byzantine(range(10), 3, seed=0) == choose_byzantine(range(10), 3, seed=0)
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


def apply_attack(
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
    translations = _find_translations(answers, following)

    def corrupt(answer: Answer) -> Answer:
        rng = adversary.generator(answer.client, round_, purpose)
        corruption = _Corruption(adversary.attack, liars, rng, translations)
        return _corrupt_answer(answer, honest, adversary.target, corruption)

    return [corrupt(answer) if answer.client in adversary.clients else answer for answer in answers]


def _find_translations(
    answers: Sequence[Reply | CalibrationReply], following: Mapping[str, Following]
) -> dict[str, Translation]:
    """Return how lies about each layer are translated; the server counts as its clients do."""
    found = {}
    for path, layer in following.items():
        counters = [answer.stats[path].num_batches for answer in answers if path in answer.stats]
        if counters and (translation := layer.translation(max(counters))):
            found[path] = translation
    return found


@dataclass(frozen=True, slots=True)
class _Corruption:
    attack: Attack
    liars: int
    rng: torch.Generator
    translations: Mapping[str, Translation]

    def corrupt_tensors(self, own: Tensors, honest: Sequence[Tensors]) -> dict[str, Tensor]:
        return {
            name: self.attack.corrupt(
                tensor, self._find_context(tensor, [h.get(name) for h in honest])
            )
            for name, tensor in own.items()
        }

    def corrupt_reports(
        self, own: Mapping[str, LayerStats], honest: Sequence[Mapping[str, LayerStats]]
    ) -> dict[str, LayerStats]:
        return {
            path: self._corrupt_report(report, [h[path] for h in honest if path in h], path)
            for path, report in own.items()
        }

    def _corrupt_report(
        self, own: LayerStats, honest: Sequence[LayerStats], path: str
    ) -> LayerStats:
        translation = self.translations.get(path)
        first, *more = (
            self._corrupt_moments(
                moments, [h.calls[i] for h in honest if i < len(h.calls)], translation
            )
            for i, moments in enumerate(own.calls)
        )
        return replace(own, moments=first, more=tuple(more))

    def _corrupt_moments(
        self, own: Moments, honest: Sequence[Moments], translation: Translation | None
    ) -> Moments:
        if self.attack.omniscient and not honest:
            return own
        if translation is None:
            return self._corrupt_values(own, honest)
        seen = [translation.to_running(moments) for moments in honest]
        lie = translation.to_moments(self._corrupt_values(translation.to_running(own), seen))
        return replace(lie, mean=lie.mean.to(own.mean), var=lie.var.to(own.var))

    def _corrupt_values(self, own: Moments, honest: Sequence[Moments]) -> Moments:
        mean = self._find_context(own.mean, [h.mean for h in honest])
        var = self._find_context(own.var, [h.var for h in honest])
        return replace(
            own,
            mean=self.attack.corrupt(own.mean, mean),
            # Backward means have no variance.
            var=self.attack.corrupt_variance(own.var, var) if own.var.numel() else own.var,
        )

    def _find_context(self, own: Tensor, honest: Sequence[Tensor | None]) -> AttackContext:
        present = [tensor for tensor in honest if tensor is not None]
        stacked = torch.stack(present) if present else own.new_empty(0, *own.shape)
        return AttackContext(stacked, self.liars, self.rng)


def _corrupt_answer(
    own: Answer, honest: Sequence[Answer], target: Target, corruption: _Corruption
) -> Answer:
    changed: dict[str, object] = {}
    if target != "updates":
        changed["stats"] = corruption.corrupt_reports(own.stats, [h.stats for h in honest])
    if isinstance(own, Reply) and target != "statistics":
        replies = [h for h in honest if isinstance(h, Reply)]
        changed["update"] = corruption.corrupt_tensors(own.update, [h.update for h in replies])
        momenta = [h.momentum for h in replies]
        changed["momentum"] = corruption.corrupt_tensors(own.momentum, momenta)
    return replace(own, **changed)  # type: ignore[arg-type]  # each is of its field's type
