"""The text that names an aggregator, and what is said of a wrong one."""

import pickle

import pytest
import torch

from fednorm.aggregators import TooFewClientsError, check, parse
from fednorm.core.aggregator import weighted_mean
from fednorm.core.registry import UnknownNameError


def test_the_mean_alone_is_the_weighted_mean_itself():
    assert parse(" mean ", f=3) is weighted_mean


def test_fields_and_the_default_number_of_byzantine_clients():
    assert parse("nnm(f=1) > trimmed_mean", f=2) == parse(" nnm( f = 1 )>trimmed_mean(f=2)", f=0)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("medain", UnknownNameError, "unknown aggregator 'medain'; did you mean 'median'"),
        ("nmm > median", UnknownNameError, "unknown pre-aggregation 'nmm'; did you mean 'nnm'"),
        ("median > nnm", UnknownNameError, "unknown pre-aggregation 'median'"),
        ("median(g=1)", UnknownNameError, "unknown field of aggregator 'median' 'g'"),
        ("median(1)", ValueError, r"median got '1', which is not a field.*'median\(f=2\)'"),
        ("median(f=1, f=2)", ValueError, "median got 'f=2'"),
        ("median(f=-1)", ValueError, "median needs a whole number f of 0 or more, not -1"),
        ("median(f=two)", ValueError, "median needs a whole number f of 0 or more, not 'two'"),
        ("median)", ValueError, r"aggregator 'median\)' is not a name with fields"),
        ("", ValueError, "aggregator '' is not a name"),
        ("nnm >", ValueError, "aggregator '' is not a name"),
    ],
)
def test_a_wrong_text_is_answered_plainly(text, error, message):
    with pytest.raises(error, match=message):
        parse(text, f=1)


@pytest.mark.parametrize("text", ["median", "trimmed_mean", "nnm > mean"])
def test_f_is_less_than_half_of_the_clients(text):
    aggregate = parse(text, f=2)
    check(aggregate, 5)
    with pytest.raises(TooFewClientsError, match=r"f=2 .* at least 5 vectors, but it gets 4;"):
        check(aggregate, 4)
    with pytest.raises(TooFewClientsError, match=r"f=2 .* at least 5 vectors, but it gets 4;"):
        aggregate(torch.zeros(4, 3), torch.ones(4))


def test_the_mean_needs_nobody():
    check(weighted_mean, 1)


def test_the_error_survives_the_way_from_another_process():
    with pytest.raises(TooFewClientsError) as caught:
        check(parse("median", f=1), 2)
    again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 (our own bytes)
    assert str(again) == str(caught.value)
