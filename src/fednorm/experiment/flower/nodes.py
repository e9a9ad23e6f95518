"""Experiments on Flower: what a node builds, and what stands between a run and its nodes."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TypeAlias

from flwr.app import Context
from flwr.serverapp import Grid

from fednorm.core.calibration import CalibrationReply
from fednorm.core.messages import Batches, Broadcast, ServerState
from fednorm.core.task import Task
from fednorm.core.types import ClientId
from fednorm.data.federation import Federation
from fednorm.data.transforms import Batch
from fednorm.engines import loop
from fednorm.engines.base import NO_FAULTS, ClientSource, Faults
from fednorm.engines.evaluation import Score, is_personal
from fednorm.engines.flower.node_app import Build, Site, client_app
from fednorm.engines.flower.remote_clients import RemoteClients
from fednorm.engines.loop import RoundResult, Start
from fednorm.errors import ConfigError
from fednorm.experiment.config import Experiment
from fednorm.experiment.specs import StrategySpec

Open: TypeAlias = Callable[[], AbstractContextManager[Grid]]


@dataclass
class Remote:
    """The clients of a run on Flower's nodes; connected while its rounds go on."""

    open: Open
    entry: int
    seed: int
    timeout: float
    link: RemoteClients | None = None

    def rounds(
        self,
        task: Task,
        clients: ClientSource,
        count: int,
        start: Start | None = None,
        conditions: Faults = NO_FAULTS,
    ) -> Iterator[RoundResult]:
        """Run federated rounds on the nodes, up to round `count`."""
        if start and _keeps_state(task):
            raise ConfigError(
                "what this strategy or its momentum keeps on the nodes is in no checkpoint, so "
                "that the run cannot go on; begin it anew with --no-resume."
            )
        with self.open() as grid:
            self.link = RemoteClients(grid, self.entry, self.seed, self.timeout)
            self.link.connect(clients.all())
            train = self.link.train
            yield from loop.rounds(task, clients, count, start, train=train, conditions=conditions)

    def ask(
        self, task: Task, received: Broadcast, asked: Sequence[ClientId]
    ) -> list[CalibrationReply]:
        """Let clients survey their data."""
        return self._get_link().ask(task, received, asked)

    def scores(
        self, task: Task, state: ServerState, clients: Sequence[ClientId], adapt: float
    ) -> dict[ClientId, Score]:
        """Let clients test their models."""
        return self._get_link().scores(task, state, clients, adapt)

    def _get_link(self) -> RemoteClients:
        if self.link is None:
            raise RuntimeError("nodes can be asked only while the rounds of a run go on.")
        return self.link


def _keeps_state(task: Task) -> bool:
    """Return whether clients keep something between their rounds."""
    algorithm = task.algorithm
    local = getattr(algorithm, "momentum_state", "local") == "local"
    return bool(task.layout.personal) or (local and getattr(algorithm, "momentum", 0.0) > 0)


def make_remote(experiment: Experiment, entry: StrategySpec, seed: int, task: Task) -> Remote:
    """Return the clients of a run in Flower's simulation runtime; refuse what it cannot do."""
    if experiment.diagnose:
        raise ValueError("engine 'flower' cannot diagnose, which needs all clients at the server.")
    attack = experiment.for_entry(entry).attack_rule
    if attack and attack.on_data:
        raise ValueError(
            "engine 'flower' leaves data as its nodes hold them, so that an attack on data cannot "
            "be made there; use another engine."
        )
    untrained = (
        experiment.unseen_clients or experiment.participation < 1 or experiment.client_dropout
    )
    if untrained and is_personal(task) and experiment.unseen_init == "average":
        raise ValueError(
            "engine 'flower' leaves personal layers on their nodes, so that there is no mean of "
            "them for clients that have not trained (unseen_clients, participation, "
            "client_dropout); use unseen_init = 'initial'."
        )
    if experiment.evaluate == "global" and (is_personal(task) or experiment.adapt_statistics):
        raise ValueError(
            "engine 'flower' tests a client's own model on its node, which does not hold all test "
            "samples; use evaluate = 'auto'."
        )
    build = partial(_build_simulated_site, experiment.model_dump_json())
    nodes = experiment.clients - experiment.unseen_clients
    number = experiment.strategies.index(entry)
    return Remote(partial(_open_simulation, build, nodes), number, seed, experiment.timeout)


def _open_simulation(build: Build, nodes: int) -> AbstractContextManager[Grid]:
    # A node of a deployment starts a process for each message, and need not wait for this import.
    from fednorm.engines.flower.simulation import start_simulation  # noqa: PLC0415

    return start_simulation(client_app(build), nodes)


def _build_simulated_site(experiment: str, context: Context, entry: int, seed: int) -> Site:
    return build_site(experiment, entry, seed, find_data_path(context))


def _build_deployed_site(context: Context, entry: int, seed: int) -> Site:
    return build_site(str(context.run_config["experiment"]), entry, seed, find_data_path(context))


def find_data_path(context: Context) -> str | None:
    """Return where a node's own data are, if it says so."""
    found = context.node_config.get("data-path")
    return None if found is None else str(found)


@lru_cache(maxsize=1)
def build_site(description: str, entry: int, seed: int, path: str | None = None) -> Site:
    """Return a run as a node sees it; with a path, all data there are the node's own."""
    from fednorm.experiment.prepare import build_run  # noqa: PLC0415 (which knows of this module)

    experiment = Experiment.model_validate_json(description).model_copy(update={"engine": "loop"})
    if path is None:
        made = build_run(experiment, experiment.strategies[entry], seed)
        return Site(made.task, made.federation, experiment.threads)
    data = experiment.data.model_copy(update={"root": path})
    own = experiment.model_copy(
        update={
            "data": data,
            "partition": "iid",
            "clients": 1,
            "unseen_clients": 0,
            "participation": 1.0,
        }
    )
    made = build_run(own, own.strategies[entry], seed)
    return Site(made.task, OwnData(made.federation), experiment.threads)


@dataclass(frozen=True)
class OwnData:
    """A node's own data: whichever client it is called, it holds all of them."""

    federation: Federation

    def all(self) -> list[ClientId]:
        """Return the only client."""
        return self.federation.all()

    def participants(self, round_: int) -> list[ClientId]:
        """Return the only client."""
        return self.federation.participants(round_)

    def batches(self, client: ClientId, round_: int) -> Batches:
        """Return the batches of a round under the client's number."""
        return replace(self.federation.batches(0, round_), client=client)

    def all_batches(self, client: ClientId) -> Batches:
        """Return all data once under the client's number."""
        return replace(self.federation.all_batches(0), client=client)

    def test(self, client: ClientId) -> Iterator[Batch]:
        """Return the node's own test split."""
        del client
        return self.federation.test(0)


client = client_app(_build_deployed_site)  # what a SuperNode runs


def use_grid(grid: Grid) -> Open:
    """Return a way to open a grid that is there already."""
    return lambda: contextlib.nullcontext(grid)
