"""SiloBN: the statistics stay with the client, γ and β are shared."""

import pytest

from strategies.personal import (
    ALGORITHMS,
    STATISTICS,
    assert_clients_differ,
    assert_is_training_with_own_tensors,
    assert_nothing_personal_is_sent,
)

PERSONAL = STATISTICS


@pytest.mark.parametrize("step", ALGORITHMS)
def test_no_personal_tensor_in_any_reply(step):
    assert_nothing_personal_is_sent("silobn", step, PERSONAL)


@pytest.mark.parametrize("step", ALGORITHMS)
def test_personal_tensors_differ_between_clients(step):
    assert_clients_differ("silobn", step, PERSONAL)


def test_is_training_with_own_tensors():
    assert_is_training_with_own_tensors("silobn", PERSONAL)
