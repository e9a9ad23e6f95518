"""FixBN: ordinary BatchNorm at first, frozen statistics afterwards.

Zhong, Chen and Chao, "Making Batch Normalization Great in Federated Deep Learning", 2023,
arXiv:2303.06530.

Stage I, up to the freezing round: as `naive`.

Stage II: clients normalise with the shared statistics, which no longer change. γ and β keep
learning unless `freeze_affine` is set. With `freeze_statistics=False` γ and β alone are frozen, and
statistics continue as in stage I (all three are in the paper's Table H; nothing frozen is `naive`).
With local epochs, stage II may diverge unless the learning rate falls when it begins, as in the
paper, which divides it by 10 at 50 % and 75 % of the rounds: `schedule = "step"` of the algorithm.

`freeze_round="auto"` follows the paper's appendix B.6: the server keeps the change of the shared
statistics over the last `window` rounds and freezes once the variance of that window falls under
`threshold`. Deviation: the change is the mean absolute change per statistic, so that one threshold
serves models of any size, and it is taken of the aggregated statistics, not of one client's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fednorm.core.layer import NormRule
from fednorm.core.messages import Broadcast, RunningStats, ServerState
from fednorm.core.types import Tensors
from fednorm.nn import rules
from fednorm.registry import param
from fednorm.strategies.base import SharedStatisticsStrategy


@dataclass(frozen=True)
class FixBN(SharedStatisticsStrategy):
    """Ordinary BatchNorm until the freezing round, then frozen shared statistics."""

    mergeable_batches: ClassVar[bool] = True
    remedy: ClassVar[str] = (
        "Frozen statistics need a smaller learning rate: the paper divides it by 10 when they "
        'freeze (algorithm.schedule = "step").'
    )

    freeze_round: int | float | Literal["auto"] = param(
        0.5, "last round of stage I: a round, a share of all rounds such as 0.5, or 'auto'"
    )
    freeze_affine: bool = param(default=False, help="whether stage II freezes γ and β too")
    freeze_statistics: bool = param(
        default=True, help="whether stage II freezes the statistics; if not, γ and β alone"
    )
    window: int = param(20, "rounds that 'auto' looks back")
    threshold: float = param(1e-6, "variance of the change under which 'auto' freezes")

    def __post_init__(self) -> None:
        super().__post_init__()
        freeze = self.freeze_round
        share = isinstance(freeze, float) and 0 <= freeze <= 1
        fixed = isinstance(freeze, int) and not isinstance(freeze, bool) and freeze >= 0
        if not (freeze == "auto" or share or fixed):
            raise ValueError(
                "freeze_round must be a round (0 or more), a share between 0.0 and 1.0, or "
                f"'auto', not {freeze!r}."
            )
        if not (self.freeze_statistics or self.freeze_affine):
            raise ValueError(
                "fixbn with freeze_statistics=False and freeze_affine=False freezes nothing; "
                "set freeze_affine=True to freeze γ and β alone, or use 'naive'."
            )
        if self.window < 2:  # noqa: PLR2004 (one value has no variance)
            raise ValueError(f"window must be at least 2 rounds, not {self.window}.")

    def is_frozen(self, broadcast: Broadcast) -> bool:
        """Return whether this round belongs to stage II."""
        if self.freeze_round == "auto":
            return bool(broadcast.state.strategy_state.get("frozen", torch.tensor(0)))
        if isinstance(self.freeze_round, int):
            return broadcast.round > self.freeze_round
        if broadcast.rounds is None:
            raise ValueError(
                f"FixBN freezes at {self.freeze_round} of all rounds, but their number is not "
                "known; give the number of rounds, or freeze_round as a round or 'auto'."
            )
        return broadcast.round > int(self.freeze_round * broadcast.rounds + 0.5)

    def rule(self, broadcast: Broadcast) -> NormRule:
        """Normalise with the batch's own statistics, then with the frozen ones."""
        if self.freeze_statistics and self.is_frozen(broadcast):
            return rules.frozen_stats
        return rules.batch_stats if self.statistics == "average" else rules.batch_stats_recorded

    def trains_affine(self, broadcast: Broadcast) -> bool:
        """Return False in stage II with `freeze_affine`."""
        return not (self.freeze_affine and self.is_frozen(broadcast))

    def remember(self, before: ServerState, running: Mapping[str, RunningStats]) -> Tensors:
        """Keep the window of changes, and whether it has become calm."""
        if self.freeze_round != "auto" or bool(
            before.strategy_state.get("frozen", torch.tensor(0))
        ):
            return before.strategy_state
        change = (_vector(running) - _vector(before.running)).abs().mean()
        changes = [
            *before.strategy_state.get("changes", torch.empty(0, dtype=torch.float64)),
            change,
        ]
        window = torch.stack(changes[-self.window :])
        calm = len(window) == self.window and window.var(correction=0) < self.threshold
        return {"changes": window, "frozen": torch.tensor(int(calm))}


def _vector(running: Mapping[str, RunningStats]) -> Tensor:
    tensors = [t for layer in running.values() for t in (layer.mean, layer.var)]
    return torch.cat(tensors).to("cpu", torch.float64)
