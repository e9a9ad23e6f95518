"""Translate corrupted running statistics into the moments that clients send.

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

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fednorm.core.merge import find_rate
from fednorm.core.messages import Broadcast, RunningStats
from fednorm.core.moments import Moments
from fednorm.core.task import Task


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
