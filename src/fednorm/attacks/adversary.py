"""The adversary: which clients are Byzantine, what they attack, and what they send instead.

Attacks corrupt running statistics; where clients send moments, these are translated.

In Algorithm 2 of FBN (Guerraoui et al., 2024, arXiv:2405.14670) client i sends the running
statistics r_i = (1-β)r + βμ_i and v_i = (1-β)v + βσ_i², and its section 5 attacks those. Here
clients send the moments (μ_i, σ_i²) and the server moves r and v towards them at a rate A, which is
β after one batch and 1-(1-β)^E after E. A Byzantine client knows r, v and β from the broadcast. It
corrupts the r_i and v_i that it would have sent, and sends the moments that give the server these:

    μ = r + (false r_i - r)/A        σ² = v + (false v_i - v)/A, or 0 if that is negative

The mean of the r_i is then the server's new r, and v is that of Algorithm 2 as well, which adds
(1/A) times the mean of (r_i - r)². Both hold for any weights of the clients. A rule that commutes
with shifting and scaling all values (median, trimmed mean, Krum, geometric median,
nearest-neighbour mixing) gives the same result on these moments as on running statistics.

A false v_i below (1-A)v, which no batch can cause, is out of reach: the server rejects negative
variances. 0 leads to the smallest v that an accepted report with that mean can cause. The factor
N/(N-1) of an unbiased variance is left out, since a client does not know N: it cancels in attacks
that keep the true variance or combine those of honest clients.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fednorm.attacks.base import Attack, AttackContext
from fednorm.core.messages import Broadcast, LayerStats, Reply, RunningStats
from fednorm.core.moments import Moments
from fednorm.core.random_streams import Stream, make_rng
from fednorm.core.strategy import find_rate
from fednorm.core.task import Task
from fednorm.core.types import ClientId, Tensors

Target: TypeAlias = Literal["updates", "statistics", "both"]


@dataclass(frozen=True, slots=True)
class TrackedLayer:
    """A layer's shared running statistics before a round, and their momentum."""

    before: RunningStats
    momentum: float | None

    def find_translation(self, batches: int) -> "Translation | None":
        """Return the translation for a round that ends at the counter `batches`.

        Return None if the server's statistics do not change, whatever is sent.
        """
        rate = find_rate(self.before, batches, self.momentum)
        return Translation(self.before, rate) if rate > 0 else None


@dataclass(frozen=True, slots=True)
class Translation:
    """Converts a client's moments to running statistics, and back."""

    before: RunningStats
    rate: float

    def to_running(self, moments: Moments) -> Moments:
        """Return the running statistics of a client with `moments`, in float64."""
        return self._change(moments, lambda old, new: torch.lerp(old, new, self.rate))

    def to_moments(self, running: Moments) -> Moments:
        """Return the moments that give `running`; variances are at least 0."""
        moments = self._change(running, lambda old, new: old + (new - old) / self.rate)
        return replace(moments, var=moments.var.clamp_min(0))

    def _change(self, values: Moments, change: Callable[[Tensor, Tensor], Tensor]) -> Moments:
        # A small rate magnifies rounding; not every device has float64.
        known = (self.before.mean, values.mean, self.before.var, values.var)
        mean, new_mean, var, new_var = (tensor.to("cpu", torch.float64) for tensor in known)
        return replace(values, mean=change(mean, new_mean), var=change(var, new_var))


def find_tracked_layers(task: Task, received: Broadcast) -> dict[str, TrackedLayer]:
    """Return the layers whose running statistics the server updates from clients' moments.

    With `statistics="average"` there are none: clients send running statistics themselves. Neither
    are there any in a strategy that measures statistics apart from training.
    """
    if task.strategy.statistics != "pool" or task.strategy.measures:
        return {}
    layers = task.layout.sharing
    return {
        path: TrackedLayer(running, layers[path].momentum)
        for path, running in received.state.running.items()
    }


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
