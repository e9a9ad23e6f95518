"""The loop over clients: what it holds."""

import weakref

from fednorm.algorithms import create_algorithm
from fednorm.engines.clients import train_in_turn
from fednorm.engines.simulate import rounds
from support import Toy, task_of


def test_replies_are_not_held_during_the_next_round():
    seen, alive = [], []

    def train(*args):
        alive.append([ref() is not None for ref in seen])
        results, answers = train_in_turn(*args)
        seen[:] = [weakref.ref(t) for reply, _ in results for t in reply.update.values()]
        return results, answers

    task = task_of("naive", create_algorithm("fedavg", lr=0.05), count=2)
    for result in rounds(task, Toy(), 2, train=train):
        assert all(ref() is not None for ref in seen)
        assert len(result.replies) == 3
        del result
    assert alive[0] == []
    assert alive[1]
    assert not any(alive[1])
