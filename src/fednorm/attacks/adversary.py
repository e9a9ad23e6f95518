"""The adversary: which clients are Byzantine, what they attack, and what they send instead."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fednorm.attacks.base import Attack, AttackContext
from fednorm.attacks.translation import TrackedLayer, Translation
from fednorm.core.messages import LayerStats, Reply
from fednorm.core.moments import Moments
from fednorm.core.random_streams import Stream, make_rng
from fednorm.core.types import ClientId, Tensors

Target: TypeAlias = Literal["updates", "statistics", "both"]


def choose_byzantine(clients: Sequence[ClientId], count: int, seed: int) -> frozenset[ClientId]:
    """Choose `count` Byzantine clients; the choice depends on the seed alone.

    >>> choose_byzantine(range(10), 3, seed=0) == choose_byzantine(range(10), 3, seed=0)
    True
    """
    chosen = make_rng(seed, Stream.BYZANTINE_CLIENTS).choice(len(clients), count, replace=False)
    return frozenset(clients[i] for i in chosen.tolist())


@dataclass(frozen=True, slots=True)
class Adversary:
    """Byzantine clients, their attack, and whether it is on updates, statistics or both."""

    attack: Attack
    clients: frozenset[ClientId]
    target: Target = "both"
    seed: int = 0

    def make_generator(self, client: ClientId, round_: int, purpose: int = 0) -> torch.Generator:
        """Return the generator of one client in one round."""
        entropy = np.random.SeedSequence([self.seed, client, round_, Stream.ATTACK_NOISE, purpose])
        seed = int(entropy.generate_state(1, np.uint64)[0] >> np.uint64(1))
        return torch.Generator().manual_seed(seed)


def apply_attack(
    answers: Sequence[Reply],
    adversary: Adversary | None,
    round_: int,
    *,
    calibration: bool = False,
    tracked: Mapping[str, TrackedLayer] = MappingProxyType({}),
) -> list[Reply]:
    """Corrupt the answers of Byzantine clients in a round, or in a calibration.

    An omniscient attack sees the honest answers of the same round and nothing else; without any it
    changes nothing. An update is attacked together with the momentum that is sent with it; buffers,
    counts and numbers of examples do not change.

    An attack corrupts running statistics. For a layer in `tracked`, whose running statistics the
    server updates from the moments that clients send, they are translated into moments; for any
    other layer the attack corrupts the values that are sent.

    An attack that is not omniscient can run on the client's machine, given its own answer alone;
    there `replacement`, which needs the number of clients in the round, must be given its scale.
    """
    if adversary is None or adversary.attack.on_data:
        return list(answers)
    readable = [answer for answer in answers if not answer.fault]
    honest = [answer for answer in readable if answer.client not in adversary.clients]
    byzantine = len(readable) - len(honest)
    if adversary.attack.omniscient and not honest:
        return list(answers)
    translations = _find_translations(answers, tracked)

    def corrupt(answer: Reply) -> Reply:
        rng = adversary.make_generator(answer.client, round_, 1 + calibration)
        corruption = _Corruption(adversary.attack, byzantine, rng, translations)
        return corruption.corrupt_answer(answer, honest, adversary.target)

    return [
        corrupt(answer) if answer.client in adversary.clients and not answer.fault else answer
        for answer in answers
    ]


def _find_translations(
    answers: Sequence[Reply], tracked: Mapping[str, TrackedLayer]
) -> dict[str, Translation]:
    """Return the translation of each tracked layer, at the highest batch counter of its clients."""
    found = {}
    for path, layer in tracked.items():
        counters = [answer.stats[path].num_batches for answer in answers if path in answer.stats]
        if counters and (translation := layer.find_translation(max(counters))):
            found[path] = translation
    return found


@dataclass(frozen=True, slots=True)
class _Corruption:
    attack: Attack
    byzantine: int
    rng: torch.Generator
    translations: Mapping[str, Translation]

    def corrupt_answer(self, own: Reply, honest: Sequence[Reply], target: Target) -> Reply:
        stats, update, momentum = own.stats, own.update, own.momentum
        if target != "updates":
            stats = {
                path: self._corrupt_report(
                    report, [h.stats[path] for h in honest if path in h.stats], path
                )
                for path, report in stats.items()
            }
        if target != "statistics":
            update = self._corrupt_tensors(update, [h.update for h in honest])
            sent = {
                name: t for name, t in momentum.items() if name in update
            }  # no numbers of steps
            momentum = {
                **momentum,
                **self._corrupt_tensors(sent, [h.momentum for h in honest]),
            }
        return replace(own, stats=stats, update=update, momentum=momentum)

    def _corrupt_tensors(self, own: Tensors, honest: Sequence[Tensors]) -> dict[str, Tensor]:
        return {
            name: self.attack.corrupt(
                tensor, self._find_context(tensor, [h.get(name) for h in honest])
            )
            for name, tensor in own.items()
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
        sent = translation.to_moments(self._corrupt_values(translation.to_running(own), seen))
        return replace(sent, mean=sent.mean.to(own.mean), var=sent.var.to(own.var))

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
        return AttackContext(stacked, self.byzantine, self.rng)
