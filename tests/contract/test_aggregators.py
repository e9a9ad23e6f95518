"""What every aggregator promises; a new one is tested by being registered."""

import dataclasses
import inspect
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fednorm.aggregators import (
    AGGREGATORS,
    PRE_AGGREGATORS,
    check_client_count,
    create_aggregator,
)
from fednorm.cli import app
from fednorm.contract import CHECKS
from fednorm.contract.combining import check_order, check_robustness, is_robust
from fednorm.errors import TooFewClientsError
from generated import aggregate, crowds, least_vectors, only_honest

STAGES = AGGREGATORS | PRE_AGGREGATORS
RULES = ("mean", "median", "trimmed_mean")  # after a pre-aggregation
TEXTS = [*AGGREGATORS, *(f"{stage} > {rule}" for stage in PRE_AGGREGATORS for rule in RULES)]
ROBUST = [text for text in TEXTS if text.rpartition(" > ")[2] != "mean"]
# Clipping of norms looks at distances from the origin.
MOVABLE = [text for text in TEXTS if "norm_clipping" not in text]

every_stage = pytest.mark.parametrize("name", sorted(STAGES))
every_text = pytest.mark.parametrize("text", TEXTS)
generated = given(data=st.data())


def vectors(n, shape=(3, 2), dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, *shape, generator=generator, dtype=dtype)


def close(found, expected, tolerance=1e-6):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@every_stage
def test_is_a_frozen_dataclass_with_explained_fields(name):
    cls = STAGES[name]
    assert dataclasses.is_dataclass(cls)
    assert cls.__dataclass_params__.frozen
    assert cls.name == name
    for field in dataclasses.fields(cls):
        assert field.metadata.get("help"), field.name


@every_stage
def test_says_in_one_line_what_it_does_and_names_its_paper(name):
    cls = STAGES[name]
    doc = cls.__doc__
    assert doc.partition("\n")[0].endswith("."), doc
    papers = f"{doc} {inspect.getmodule(cls).__doc__}"
    assert name == "mean" or re.search(r"arXiv:\d{4}\.\d{4,5}|doi:10\.\d+/\S+", papers)


def test_all_are_listed_by_the_command():
    result = CliRunner().invoke(app, ["list", "aggregators"])
    assert result.exit_code == 0
    listed = {line.split()[0] for line in result.output.splitlines() if line.strip()}
    assert STAGES.keys() <= listed


@pytest.mark.slow
@every_text
def test_keeps_the_contract(text):
    """`fednorm check` calls the same checks."""
    for check in CHECKS["aggregator"]:
        check(text)
    assert is_robust(text) is (text in ROBUST)


@every_text
def test_single_and_double_precision_agree(text):
    values = vectors(13, dtype=torch.float32)
    close(aggregate(text, values, 2).double(), aggregate(text, values.double(), 2), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("text", [text for text in TEXTS if "bucketing" not in text])
@generated
def test_the_order_of_clients_does_not_matter(text, data):
    values, f = only_honest(data.draw(crowds(text=text)), text)
    seed = data.draw(st.integers(0, 2**32))
    order = np.random.default_rng(seed).permutation(len(values))
    check_order(text, values, f, order.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("text", MOVABLE)
@generated
def test_a_shift_of_all_shifts_the_result(text, data):
    values, f = only_honest(data.draw(crowds(text=text)), text)
    shift = data.draw(st.sampled_from([0.25, -3.0, 1000.0]))
    close(aggregate(text, values + shift, f), aggregate(text, values, f) + shift)


@pytest.mark.slow
@pytest.mark.parametrize("text", ROBUST)
@generated
def test_byzantine_vectors_cannot_move_it_far_away(text, data):
    check_robustness(text, *data.draw(crowds(np.float32, text)))  # which may be 1e30 away


@pytest.mark.parametrize("text", sorted(set(TEXTS) - set(ROBUST)))
def test_the_others_are_moved_by_one(text):
    values = vectors(13)
    away = values.clone()
    away[0] = 1e6
    assert (aggregate(text, away, 0) - aggregate(text, values, 0)).norm() > 1e4


@pytest.mark.parametrize("text", [text for text in TEXTS if text != "mean"])
@pytest.mark.parametrize("f", [1, 3])
def test_too_few_clients_are_refused_with_the_rule_and_the_numbers(text, f):
    least = least_vectors(text, f)
    assert least > 2 * f
    assert torch.isfinite(aggregate(text, vectors(least), f)).all()
    for attempt in (check_client_count, lambda rule, n: rule(vectors(n), torch.ones(n))):
        with pytest.raises(TooFewClientsError, match=f"f={f} .*; lower f") as raised:
            attempt(create_aggregator(text, f), least - 1)
        found = raised.value
        assert found.stage in text
        assert found.rows < found.needed
        assert str(found).startswith(
            f"{found.stage} with f={f} Byzantine clients needs at least {found.needed} vectors, "
            f"but it gets {found.rows};"
        )


@every_stage
@pytest.mark.parametrize("f", [-1, 1.5, True, "two"])
def test_a_number_of_byzantine_clients_that_is_none_is_refused(name, f):
    with pytest.raises(ValueError, match=f"{name} needs a whole number f of 0 or more"):
        STAGES[name](f=f)
