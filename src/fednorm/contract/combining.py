"""What aggregators and attacks promise.

A check of an aggregator takes its text, as in a configuration; the tests give generated inputs, and
`fednorm check` has those that are the defaults.
"""

from collections.abc import Sequence
from itertools import count, product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fednorm.aggregators import check_client_count, create_aggregator
from fednorm.aggregators.base import Pipeline, Stage
from fednorm.attacks.base import Attack, AttackContext, DataAttack, DataInfo
from fednorm.contract.training import check_fields, check_sending, require, require_equal
from fednorm.errors import ContractError, TooFewClientsError

_MANY = 13  # vectors, enough for every rule with f = 2
_FAR = 60  # times the honest spread that f Byzantine vectors may move a result
_CLOSE = 1e-6
_MOST = 200  # vectors that a rule may need at least


def draw_vectors(
    n: int = _MANY, shape: tuple[int, ...] = (3, 2), dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return the values of some clients."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, *shape, generator=generator, dtype=dtype)


def combine(text: str, values: Tensor, f: int = 0) -> Tensor:
    """Combine values by the aggregator that a text names."""
    return create_aggregator(text, f)(values, torch.ones(len(values), dtype=torch.float64))


def list_stages(text: str) -> list[Stage]:
    """Return the stages of an aggregator, the rule last."""
    made = create_aggregator(text)
    stages: Sequence[Any] = (*made.stages, made.rule) if isinstance(made, Pipeline) else (made,)
    return [stage for stage in stages if isinstance(stage, Stage)]


def is_robust(text: str) -> bool:
    """Return whether an aggregator claims to withstand Byzantine clients."""
    stages = list_stages(text)
    return bool(stages) and stages[-1].robust


def count_least(text: str, f: int) -> int:
    """Return the smallest number of vectors that an aggregator takes."""
    for n in count(1):
        require(
            n < _MOST, f"with f = {f} it takes no number of clients below {_MOST}; see check()."
        )
        try:
            check_client_count(create_aggregator(text, f), n)
        except TooFewClientsError:
            continue
        return n
    raise AssertionError


def check_stage_fields(text: str) -> None:
    """Each field has a sentence that explains it."""
    for stage in list_stages(text):
        check_fields(stage)


def check_shapes(text: str) -> None:
    """It keeps shape and type, and leaves its input alone."""
    for shape, dtype in product([(), (1,), (3, 2), (4, 1, 5)], [torch.float32, torch.float64]):
        values = draw_vectors(_MANY, shape, dtype)
        before = values.clone()
        result = combine(text, values, 2)
        found = tuple(result.shape), result.dtype
        told = f"of {_MANY} tensors of shape {shape} and {dtype} it makes one of {found}."
        require(found == (shape, dtype), told)
        require(torch.isfinite(result).all(), "the result is not finite.")
        result.add_(1)
        told = "the input is changed, or the result is a part of it; copy it"
        require_equal(values, before, told)


def check_agreement(text: str) -> None:
    """Of equal vectors the result is that vector, also of a single one."""
    one = draw_vectors(1)[0]
    for f in (0, 2):
        found = combine(text, one.repeat(_MANY, 1, 1), f)
        require_equal(found, one, f"with f = {f} it is another vector", 1e-12)
    if count_least(text, 0) == 1:
        require_equal(combine(text, one[None]), one, "one client alone gets another vector", 1e-12)


def check_determinism(text: str) -> None:
    """The same input gives the same bits, whatever the global random state."""
    values, before = draw_vectors(), torch.get_rng_state()
    try:
        torch.manual_seed(1)
        first = combine(text, values, 2)
        torch.manual_seed(2)
        told = "it draws from torch's global generator; draw from one with a fixed seed"
        require_equal(combine(text, values, 2), first, told)
    finally:
        torch.set_rng_state(before)


def check_order(
    text: str, values: Tensor | None = None, f: int = 2, order: Sequence[int] | None = None
) -> None:
    """The order of clients does not matter, unless it declares `ordered`."""
    if any(stage.ordered for stage in list_stages(text)):
        return
    values = draw_vectors() if values is None else values
    chosen = list(reversed(range(len(values)))) if order is None else list(order)
    told = "clients in another order give another result; if that is meant, set `ordered = True`"
    require_equal(combine(text, values[chosen], f), combine(text, values, f), told, _CLOSE)


def check_robustness(
    text: str,
    values: Tensor | None = None,
    f: int = 2,
    honest: NDArray[np.bool_] | None = None,
) -> None:
    """Byzantine clients, f of them, cannot move it far, unless it declares `robust = False`."""
    if not is_robust(text):
        return
    cases = [(values, honest)] if values is not None else [*_draw_crowds(text, f)]
    for crowd, good in cases:
        assert crowd is not None, "both are given"  # noqa: S101
        truth = crowd[torch.as_tensor(good)]
        spread = float((truth.amax(0) - truth.amin(0)).norm() + truth.flatten(1).norm(dim=1).max())
        away = float((combine(text, crowd, f) - truth.mean(0)).norm())
        told = f"{f} of {len(crowd)} clients move the result by {away:.2g}, where the honest ones "
        told += (
            f"are within {spread:.2g}; if it is not meant to withstand them, set robust = False."
        )
        require(away <= _FAR * spread, told)


def _draw_crowds(text: str, f: int) -> list[tuple[Tensor, NDArray[np.bool_]]]:
    found = []
    for lie in (1e6, -1e30, 3.5):
        values = draw_vectors(max(_MANY, count_least(text, f)), (4,))
        honest = np.ones(len(values), dtype=bool)
        honest[1 : 1 + f] = False
        values[1 : 1 + f] = lie
        found.append((values, honest))
    return found


def check_least(text: str) -> None:
    """Too few clients for f are refused, and without rejected ones f is lower."""
    if not list_stages(text):
        return
    for f in (1, 3):
        least = count_least(text, f)
        require(least > 2 * f, f"with f = {f} it takes {least} clients, of which {f} are half.")
        require(torch.isfinite(combine(text, draw_vectors(least), f)).all(), "it is not finite.")
        try:
            combine(text, draw_vectors(least - 1), f)
        except TooFewClientsError:
            continue
        raise ContractError(f"check(n) refuses {least - 1} clients with f = {f}, a call does not.")
    lowered = create_aggregator(text, 3).without(2)
    require(lowered == create_aggregator(text, 1), "without(2) of f = 3 is not f = 1.")


def check_rule_sending(text: str) -> None:
    """It can be sent to worker processes and compared."""
    check_sending(create_aggregator(text, 1))


AGGREGATOR_CHECKS = (
    check_stage_fields,
    check_rule_sending,
    check_shapes,
    check_agreement,
    check_determinism,
    check_order,
    check_robustness,
    check_least,
)


def check_corruption(attack: Attack) -> None:
    """What it sends has the shape and type of an honest reply, whose tensor it leaves alone."""
    if isinstance(attack, DataAttack):
        x, y = draw_vectors(6, (1, 8, 8), torch.float32), torch.arange(6) % 3
        before = x.clone(), y.clone()
        info = DataInfo(3, torch.ones(1, 8, 8))
        rng = torch.Generator().manual_seed(0)
        found = attack.poison(x, y, info, rng)
        for name, new, old, kept in zip("xy", found, (x, y), before, strict=True):
            require_equal(old, kept, f"poison changes {name} of the client in place; copy it")
            require(new.dtype == old.dtype, f"poison returns {name} as {new.dtype}.")
        return
    own, honest = draw_vectors(1)[0], draw_vectors(4)
    before_own, before_honest = own.clone(), honest.clone()
    for corrupt in (attack.corrupt, attack.corrupt_variance):
        sent = [corrupt(own.abs(), _make_context(honest)) for _ in range(2)]
        require(sent[0].shape == own.shape, f"it sends a tensor of shape {tuple(sent[0].shape)}.")
        require(sent[0].dtype == own.dtype, f"it sends a tensor of {sent[0].dtype}.")
        same = torch.equal(sent[0].nan_to_num(), sent[1].nan_to_num())
        require(same, "it sends another tensor with the same generator; draw from context.rng.")
        corrupt(own, _make_context(honest))
        require_equal(own, before_own, "it changes the client's tensor in place; return a new one")
        require_equal(honest, before_honest, "it changes what honest clients send")


def _make_context(honest: Tensor) -> AttackContext:
    return AttackContext(honest, 1, torch.Generator().manual_seed(0))


ATTACK_CHECKS = (check_fields, check_sending, check_corruption)
