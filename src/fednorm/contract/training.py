"""What strategies and algorithms promise: checks that train on a few small clients."""

import copy
import dataclasses
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fednorm.algorithms import create_algorithm
from fednorm.core.messages import Batches, ClientState
from fednorm.core.round import broadcast, client_round, server_round
from fednorm.core.strategy import Strategy
from fednorm.core.task import Task, export
from fednorm.core.types import Role
from fednorm.data.transforms import Batch
from fednorm.engines import ENGINES
from fednorm.engines.base import EngineRun, RoundResult
from fednorm.engines.loop import rounds
from fednorm.errors import ContractError
from fednorm.experiment.checkpoint import Checkpoint, check_fit, load_newest, save_checkpoint
from fednorm.models import create_model
from fednorm.nn.folding import fold
from fednorm.strategies import create_strategy

SHAPE, CLASSES = (1, 8, 8), 4
_CLOSE = 1e-9  # in float64
_LOCAL = ("merged", "stacked", "barrier")  # engines that need no other process
_SIZES = (5, 5, 5)


def nested_model(seed: int = 0) -> nn.Module:
    """Residual net in float64 with BatchNorm in blocks and in a downsample path."""
    return create_model("resnet", SHAPE, CLASSES, seed, widths=(4, 6)).double()


@dataclass(frozen=True)
class ToyClients:
    """Clients whose data differ in mean and scale; client i's batches have sizes[i] samples."""

    sizes: tuple[int, ...] = _SIZES
    steps: int = 1
    absent: Mapping[int, Sequence[int]] = field(default_factory=dict)  # by round
    shape: tuple[int, ...] = SHAPE
    classes: int = CLASSES
    broken: frozenset[int] = frozenset()  # clients whose data are no numbers

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.sizes)

    def all(self) -> list[int]:
        """Return all clients."""
        return list(range(self.clients))

    def all_batches(self, client: int) -> Batches:
        """Return all data of a client once."""
        return Batches(client, self._all_batches(client), 3 * self.sizes[client])

    def _all_batches(self, client: int) -> list[Batch]:
        rounds = (101, 102, 103)
        return [self._batch(client, self._generator(client, round_)) for round_ in rounds]

    @staticmethod
    def _generator(client: int, round_: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * round_ + client)

    def participants(self, round_: int) -> list[int]:
        """Return the clients of a round."""
        gone = self.absent.get(round_, ())
        return [client for client in range(self.clients) if client not in gone]

    def batches(self, client: int, round_: int) -> Batches:
        """Return the batches of a client's round."""
        generator = self._generator(client, round_)
        steps = [self._batch(client, generator) for _ in range(self.steps)]
        size = self.sizes[client]
        return Batches(
            client,
            steps,
            size * self.steps,
            seed=round_ * 100 + client,
            all_data=self._all_batches(client),
            batch_sizes=(size,) * self.steps,
        )

    def _batch(self, client: int, generator: torch.Generator) -> Batch:
        size = self.sizes[client]
        x = torch.randn(size, *self.shape, generator=generator, dtype=torch.float64)
        y = torch.randint(self.classes, (size,), generator=generator)
        spoilt = float("nan") if client in self.broken else 0.0
        return x * (1 + client) + 2 * client + spoilt, y

    def test(self, client: int) -> list[Batch]:
        """Return the test split of a client."""
        return list(self.batches(client, 999).steps)[:1]

    def union(self, round_: int) -> Batch:
        """Return the batches of all clients of a round in one."""
        parts = [next(iter(self.batches(c, round_).steps)) for c in self.participants(round_)]
        return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def require(condition: object, problem: str) -> None:
    """Raise ContractError with a problem unless a condition holds."""
    if not condition:
        raise ContractError(problem)


def require_equal(found: Tensor, expected: Tensor, problem: str, close: float = 0.0) -> None:
    """Raise ContractError unless two tensors are equal, or close."""
    if found.shape != expected.shape:
        raise ContractError(f"{problem} (shapes {tuple(found.shape)}, {tuple(expected.shape)})")
    if close == 0.0 and torch.equal(found, expected):
        return
    away = float((found - expected).abs().max()) if found.numel() else 0.0
    if not away <= close * (1 + float(expected.abs().max() if found.numel() else 0.0)):
        raise ContractError(f"{problem} (they differ by {away:.2g})")


def check_fields(entry: Any) -> None:
    """Each field has a sentence that explains it."""
    unexplained = [f.name for f in dataclasses.fields(entry) if not f.metadata.get("help")]
    require(
        not unexplained,
        f"{', '.join(unexplained)} has none, so `fednorm show` cannot tell what it is; declare it "
        "with fednorm.registry.param(default, 'what it is').",
    )


def check_sending(entry: Any) -> None:
    """It can be sent to worker processes and compared."""
    sent = pickle.loads(pickle.dumps(entry))  # noqa: S301 (our own bytes)
    equal = sent == entry and copy.deepcopy(entry) == entry
    require(equal, "a copy is not equal to it; keep all that it has in its fields.")


def _make_tasks(entry: Any) -> list[Task]:
    """Return a strategy with each algorithm, or an algorithm with some strategies."""
    if isinstance(entry, Strategy):
        steps = [create_algorithm(name, lr=0.05, momentum=0.9) for name in ("dsgd", "fedavg")]
        pairs: list[tuple[Strategy, Any]] = [(entry, step) for step in steps]
    else:
        pairs = [(create_strategy(name), entry) for name in ("naive", "fbn", "gn")]
    return [Task.build(nested_model(), first, second, rounds=20) for first, second in pairs]


def _train(task: Task, count: int, clients: ToyClients | None = None) -> RoundResult:
    *_, result = rounds(task, clients or ToyClients(), count)
    return result


def check_conversion(strategy: Strategy) -> None:
    """It converts a copy of the model and leaves the model itself alone."""
    model = nested_model()
    before = copy.deepcopy(model.state_dict())
    converted = strategy.convert(model).model
    require(converted is not model, "convert returns the model itself; convert a copy.")
    for key, tensor in model.state_dict().items():
        require_equal(tensor, before[key], f"convert changed {key} of the model; convert a copy.")


def check_roles(strategy: Strategy) -> None:
    """Every tensor of the model has a role and a place."""
    task = Task.build(nested_model(), strategy, create_algorithm("dsgd"))
    layout, saved = task.layout, task.model.state_dict()
    named = {key for key, tensor in saved.items() if tensor.numel()}
    wrong = sorted(set(layout.roles) ^ named)
    require(not wrong, f"{', '.join(wrong)} has none; return a Role for it from `role`.")
    places = set(layout.shared) | set(layout.personal) | set(layout.buffers)
    for key, role in layout.roles.items():
        found = (key in places) == (role is not Role.STATISTIC)
        require(found, f"{key} is {role}, but is not kept where such tensors are.")


def check_training(entry: Any) -> None:
    """It trains: every weight moves, all stay finite, and no reply is rejected."""
    for task in _make_tasks(entry):
        result = _train(task, 4)
        reasons = "; ".join(f"client {one.client}: {one.reason}" for one in result.state.rejected)
        require(not reasons, f"the server rejects replies: {reasons}")
        require(result.state.round == 4, "the server does not count the round.")  # noqa: PLR2004
        for key, tensor in result.state.weights.items():
            require(torch.isfinite(tensor).all(), f"{key} is not finite after 4 rounds.")
            still = torch.equal(tensor, task.initial_state.weights[key])
            require(not still, f"{key} has not moved in 4 rounds.")


def check_purity(entry: Any) -> None:
    """A client's round is a pure function: the same arguments give the same reply."""
    for task in _make_tasks(entry):
        clients, received = ToyClients(), broadcast(task, task.initial_state)
        start = {k: v.clone() for k, v in received.state.weights.items()}
        first = client_round(task, received, ClientState(), clients.batches(0, 1))
        client_round(task, received, ClientState(), clients.batches(1, 1))
        again = client_round(task, received, ClientState(), clients.batches(0, 1))
        why = "is another one the second time: the round before left something behind; keep state "
        why += "in the client's tensors or the server's, not in the object or a module"
        for key, value in first[0].update.items():
            require_equal(again[0].update[key], value, f"the update of {key} {why}")
        for key, value in first[1].tensors.items():
            require_equal(again[1].tensors[key], value, f"the client's {key} {why}")
        for key, value in received.state.weights.items():
            require_equal(value, start[key], f"the round changes the received {key} in place")
        after = server_round(task, task.initial_state, [first[0]])
        kept = task.initial_state.round == 0 and after.round == 1
        require(kept, "the server's round changes its argument; return a new state.")


def check_evaluation(strategy: Strategy) -> None:
    """Evaluation of a sample depends on no other sample."""
    task = _make_tasks(strategy)[0]
    clients = ToyClients()
    result = _train(task, 3, clients)
    model = export(task, result.state, result.client_states[0])
    require(not model.training, "the exported model is in training mode.")
    ((x, _),) = clients.test(0)
    with torch.no_grad():
        told = "scores of a sample change with the batch it is in: a layer uses the batch's "
        told += "statistics in evaluation mode"
        require_equal(model(x)[:1], model(x[:1]), told, 1e-7)


def check_strict_loading(strategy: Strategy) -> None:
    """The trained model's state_dict loads strictly into a new one."""
    task = _make_tasks(strategy)[0]
    result = _train(task, 2)
    saved = export(task, result.state, result.client_states[0]).state_dict()
    fresh = task.strategy.convert(nested_model(3)).model
    fresh.load_state_dict(saved, strict=True)
    for key, value in fresh.state_dict().items():
        require_equal(value, saved[key], f"{key} is another one after loading")


def check_export(strategy: Strategy) -> None:
    """The exported model, folded to torch's layers, says the same."""
    task = _make_tasks(strategy)[0]
    result = _train(task, 2)
    model = export(task, result.state, result.client_states[0])
    folded = fold(model)
    ((x, _),) = ToyClients().test(0)
    with torch.no_grad():
        told = "fednorm.fold gives a model with other scores; a layer of yours needs folding"
        require_equal(folded(x), model(x), told, 1e-7)
        again = copy.deepcopy(folded)
        again.load_state_dict(folded.state_dict(), strict=True)
        require_equal(again(x), folded(x), "its state_dict is not all of it")


def check_single_samples(strategy: Strategy) -> None:
    """A batch of one sample works, or the strategy declares `needs_batch_statistics`."""
    task = _make_tasks(strategy)[0]
    if strategy.needs_batch_statistics:
        return
    batches = ToyClients(sizes=(1, 1)).batches(0, 1)
    received = broadcast(task, task.initial_state)
    reply, _ = client_round(task, received, ClientState(), batches)
    for key, tensor in reply.update.items():
        told = f"the update of {key} is not finite; declare needs_batch_statistics = True."
        require(torch.isfinite(tensor).all(), told)


def check_engines(entry: Any) -> None:
    """Every engine that takes it gives what `loop` gives."""
    _compare_engines(entry, _LOCAL, _CLOSE)


def check_processes(entry: Any) -> None:
    """Worker processes give the same bits."""
    _compare_engines(entry, ("processes",), 0.0)


def _compare_engines(entry: Any, names: Sequence[str], close: float) -> None:
    clients = ToyClients(sizes=(5, 5, 4))
    for task in _make_tasks(entry):
        expected = _train(task, 2, clients).state
        for name in names:
            run = EngineRun(task, clients, 2, processes=2)
            if ENGINES[name].why_not(run):
                continue
            *_, found = ENGINES[name].rounds(run)
            for key, value in expected.weights.items():
                told = f"engine {name!r} gives another {key}; declare what it needs, such as "
                told += "mergeable_batches = False, or make the rule depend on its arguments alone"
                require_equal(found.state.weights[key], value, told, close)
            for path, running in expected.running.items():
                told = f"engine {name!r} gives other statistics of {path}"
                require_equal(found.state.running[path].mean, running.mean, told, close)
                require_equal(found.state.running[path].var, running.var, told, close)
        if len(names) == 1:
            return  # to start processes takes seconds


def check_resumption(entry: Any) -> None:
    """A run that is resumed from a checkpoint gives the same bits."""
    task, clients = _make_tasks(entry)[-1], ToyClients()
    whole = _train(task, 4)
    half = _train(task, 2)
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder), {}, Checkpoint(half.state, half.client_states, {}))
        start, damaged = load_newest(
            Path(folder), {}, check=lambda c: check_fit(c, task, clients.clients, 4)
        )
    require(start and not damaged, f"the checkpoint cannot be read: {'; '.join(damaged)}")
    *_, resumed = rounds(task, clients, 4, start=start)
    for key, value in whole.state.weights.items():
        told = f"{key} is another one; keep what later rounds need in `remember`, in buffers, or "
        told += "in the client's state"
        require_equal(resumed.state.weights[key], value, told)


STRATEGY_CHECKS = (
    check_fields,
    check_sending,
    check_conversion,
    check_roles,
    check_training,
    check_purity,
    check_evaluation,
    check_strict_loading,
    check_export,
    check_single_samples,
    check_engines,
    check_resumption,
)
ALGORITHM_CHECKS = (
    check_fields,
    check_sending,
    check_training,
    check_purity,
    check_engines,
    check_resumption,
)
PROCESS_CHECKS = (check_processes,)
