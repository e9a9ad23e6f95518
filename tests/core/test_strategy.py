"""The base class of strategies: its defaults, and the wrapper that hands all of them on."""

from types import SimpleNamespace

import pytest

from fednorm import ClientState, broadcast, client_round, create_strategy
from fednorm.algorithms import create_algorithm
from fednorm.core.strategy import Strategy
from fednorm.core.task import Task
from fednorm.nn.convert import to_fed_batch_norm
from fednorm.strategies import STRATEGIES
from support import ToyClients, nested_model

MEMBERS = sorted(name for name in vars(Strategy) if not name.startswith("_"))


@pytest.mark.parametrize("name", [name for name in MEMBERS if name != "convert"])
def test_fedfn_asks_its_base_for_every_member(name):
    wrapped, answer = create_strategy("fedfn", base="fbn"), object()
    wrapped.__dict__["_base"] = SimpleNamespace(**{name: answer})
    assert getattr(wrapped, name) is answer


def test_a_strategy_must_say_how_it_converts():
    class Unfinished(Strategy):
        pass

    with pytest.raises(TypeError, match="convert"):
        Unfinished()


def test_layers_without_a_rule_are_refused_when_they_train():
    class Ruleless(Strategy):
        def convert(self, model):
            return to_fed_batch_norm(model)

    task = Task.build(nested_model(), Ruleless(), create_algorithm("dsgd"))
    received = broadcast(task, task.initial_state)
    with pytest.raises(NotImplementedError, match="override its rule"):
        client_round(task, received, ClientState(), ToyClients().batches(0, 1))


def test_strategies_that_can_be_merged():
    merged = {name for name in STRATEGIES if create_strategy(name).mergeable_batches}
    apart = {"fedbn", "silobn", "feddna", "hbn", "alignbn", "brn", "switchnorm"}
    assert merged == set(STRATEGIES) - apart
