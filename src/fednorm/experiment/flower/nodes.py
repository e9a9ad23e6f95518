"""Experiments on Flower's nodes: what a node builds, and how a run reaches the nodes."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from flwr.app import Context
from flwr.serverapp import Grid

from fednorm.core.messages import Batches
from fednorm.core.types import ClientId
from fednorm.data.federation import Federation
from fednorm.data.transforms import Batch
from fednorm.engines.evaluation import is_personal
from fednorm.engines.flower.node_app import Build, Site, client_app
from fednorm.engines.flower.remote_clients import FlowerNodes
from fednorm.experiment.build import PreparedRun, build_run
from fednorm.experiment.flower import read_experiment
from fednorm.experiment.schema.config import Experiment


def make_nodes(experiment: Experiment, prepared: PreparedRun) -> FlowerNodes:
    """Return the nodes of a run in Flower's simulation runtime; they build it by themselves."""
    build = partial(_build_site, experiment.model_dump_json())
    return FlowerNodes(
        partial(_open_simulation, build, experiment.clients - experiment.unseen_clients),
        experiment.strategies.index(prepared.entry),
        prepared.seed,
        experiment.timeout,
        refusal=_find_refusal(prepared),
    )


def _find_refusal(prepared: PreparedRun) -> str | None:
    """Return what nodes cannot do of a run, or None."""
    experiment, personal = prepared.experiment, is_personal(prepared.task)
    untrained = (
        experiment.unseen_clients or experiment.participation < 1 or experiment.client_dropout
    )
    if experiment.diagnose:
        return "engine 'flower' cannot diagnose, which needs all clients at the server"
    if prepared.data_info:
        return "engine 'flower' leaves data on its nodes, so an attack on data cannot be made there"
    if untrained and personal and experiment.unseen_init == "average":
        return (
            "engine 'flower' leaves personal layers on their nodes, so there is no mean of them "
            "for clients that have not trained (unseen_clients, participation, client_dropout); "
            "use unseen_init = 'initial'"
        )
    if experiment.evaluate == "global" and (personal or experiment.adapt_statistics):
        return (
            "engine 'flower' tests a client's own model on its node, which does not hold all test "
            "samples; use evaluate = 'auto'"
        )
    return None


def _open_simulation(build: Build, nodes: int) -> AbstractContextManager[Grid]:
    # A node of a deployment starts a process for each message, and need not wait for this import.
    from fednorm.engines.flower.simulation import start_simulation  # noqa: PLC0415

    return start_simulation(client_app(build), nodes)


def _build_site(experiment: str | None, context: Context, entry: int, seed: int) -> Site:
    """Build a run as a node sees it; None is the experiment that was sent to its SuperNode."""
    description = experiment or str(context.run_config["experiment"])
    if experiment is None:
        read_experiment(description, str(context.node_config.get("allow", "")))
    path = context.node_config.get("data-path")  # of the node's own data, if it has any
    return build_site(description, entry, seed, None if path is None else str(path))


@lru_cache(maxsize=1)
def build_site(description: str, entry: int, seed: int, path: str | None = None) -> Site:
    """Return a run as a node sees it; with `path`, all data there are the node's own."""
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
    """A node's own data; it holds all of them, whatever its client's number."""

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


client = client_app(partial(_build_site, None))  # what a SuperNode runs
