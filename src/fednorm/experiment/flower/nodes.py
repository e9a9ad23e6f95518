"""Experiments on Flower's nodes: what a node builds, and how a run reaches the nodes.

Flower's simulation runtime wants to call a ServerApp; here a loop wants to call the runtime. So the
ServerApp only hands out its grid and waits until the loop is done with it.
"""

import logging
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fednorm.core.messages import Batches
from fednorm.core.types import ClientId
from fednorm.data.federation import Federation
from fednorm.data.transforms import Batch
from fednorm.engines.evaluation import is_personal
from fednorm.engines.flower.node_app import Build, Site, client_app
from fednorm.engines.flower.remote_clients import FlowerNodes
from fednorm.errors import SimulationError
from fednorm.experiment.build import PreparedRun, build_run
from fednorm.experiment.flower import open_experiment
from fednorm.experiment.schema.config import Experiment

_POLL = 0.2  # seconds, to wait for Ray


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


@contextmanager
def start_simulation(app: ClientApp, nodes: int) -> Iterator[Grid]:
    """Run `nodes` nodes in processes of this machine, one thread each, within the block."""
    # A node of a deployment starts a process for each message, and need not wait for these.
    import ray  # noqa: PLC0415
    from flwr.simulation import run_simulation  # noqa: PLC0415

    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    # Ray's workers yield to every other process (nice 15): next to four busy ones on two cores,
    # two runs at once took 280 to 300 s, and take 90 to 140 s at normal priority.
    os.environ.setdefault("RAY_worker_niceness", "0")
    grids: queue.Queue[Grid] = queue.Queue()
    failures: list[RuntimeError] = []
    done = threading.Event()
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        del context
        grids.put(grid)
        done.wait()

    def run() -> None:
        try:
            run_simulation(
                server,
                app,
                nodes,
                backend_config={
                    # Else Ray joins a cluster that it finds, and waits for CPUs taken there.
                    "init_args": {"address": "local"},
                    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                },
            )
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    # Flower tells every step, and that its Python interface may go one day.
    flower = logging.getLogger("flwr")
    level = flower.level
    flower.setLevel(logging.ERROR)
    thread.start()
    try:
        # The grid is there at once, but without Ray no node would ever answer.
        while not ray.is_initialized():
            if not thread.is_alive():
                raise SimulationError(
                    "Flower's simulation runtime did not start; its messages say why."
                ) from (failures[0] if failures else None)
            thread.join(_POLL)
        yield grids.get()
    finally:
        done.set()
        thread.join()
        flower.setLevel(level)


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
    return start_simulation(client_app(build), nodes)


def _build_site(experiment: str | None, context: Context, entry: int, seed: int) -> Site:
    """Build a run as a node sees it; None is the experiment that was sent to its SuperNode."""
    description = experiment or str(context.run_config["experiment"])
    path = context.node_config.get("data-path")  # of the node's own data, if it has any
    own = None if path is None else str(path)
    if experiment is not None:
        return build_site(description, entry, seed, own)
    with open_experiment(description, str(context.node_config.get("allow", ""))):
        return build_site(description, entry, seed, own)


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
