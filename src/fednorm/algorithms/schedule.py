"""Learning rates by round."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

Schedule: TypeAlias = Literal["constant", "step", "inverse"]


def learning_rate(
    rate: float,
    schedule: Schedule,
    round_: int,
    rounds: int | None,
    *,
    every: int = 1000,
    milestones: Sequence[float] = (0.5, 0.75),
) -> float:
    """Return the learning rate of a round, counted from 1.

    `step` divides by 10 at each milestone, a share of the rounds (FixBN); `inverse` is
    η/(1+⌊t/every⌋) with t counted from 0 (FBN).

    >>> [learning_rate(0.1, "inverse", t, None) for t in (1, 1000, 1001)]
    [0.1, 0.1, 0.05]
    """
    if schedule == "constant":
        return rate
    if schedule == "inverse":
        return rate / (1 + (round_ - 1) // every)
    if rounds is None:
        raise ValueError("the schedule 'step' needs the number of rounds; give it, or 'constant'.")
    passed = sum(round_ > share * rounds for share in milestones)
    return rate * 0.1**passed
