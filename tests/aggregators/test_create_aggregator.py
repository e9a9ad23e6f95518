"""The text that names an aggregator, and the errors of an invalid one."""

import pickle

import pytest
import torch

from fednorm.aggregators import check_client_count, create_aggregator
from fednorm.core.aggregation import weighted_mean
from fednorm.errors import TooFewClientsError, UnknownNameError


def test_the_mean_alone_is_the_weighted_mean_itself():
    assert create_aggregator(" mean ", f=3) is weighted_mean


def test_fields_and_the_default_number_of_byzantine_clients():
    assert create_aggregator("nnm(f=1) > trimmed_mean", f=2) == create_aggregator(
        " nnm( f = 1 )>trimmed_mean(f=2)", f=0
    )


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("medain", UnknownNameError, "unknown aggregator 'medain'; did you mean 'median'"),
        ("my-median(f=1)", UnknownNameError, "unknown aggregator 'my-median'"),  # of a package
        ("nmm > median", UnknownNameError, "unknown pre-aggregation 'nmm'; did you mean 'nnm'"),
        ("median > nnm", UnknownNameError, "unknown pre-aggregation 'median'"),
        (
            "centred_clipping(radius=2)",
            UnknownNameError,
            "aggregator 'centred_clipping' is now called 'centered_clipping'",
        ),
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
def test_an_invalid_text_is_explained(text, error, message):
    with pytest.raises(error, match=message):
        create_aggregator(text, f=1)


@pytest.mark.parametrize("text", ["median", "trimmed_mean", "nnm > mean"])
def test_f_is_less_than_half_of_the_clients(text):
    aggregate = create_aggregator(text, f=2)
    check_client_count(aggregate, 5)
    with pytest.raises(TooFewClientsError, match=r"f=2 .* at least 5 vectors, but it gets 4;"):
        check_client_count(aggregate, 4)
    with pytest.raises(TooFewClientsError, match=r"f=2 .* at least 5 vectors, but it gets 4;"):
        aggregate(torch.zeros(4, 3), torch.ones(4))


def test_the_mean_needs_no_minimum_of_clients():
    check_client_count(weighted_mean, 1)


def test_the_error_can_be_pickled():
    with pytest.raises(TooFewClientsError) as caught:
        check_client_count(create_aggregator("median", f=1), 2)
    again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 (our own bytes)
    assert str(again) == str(caught.value)
