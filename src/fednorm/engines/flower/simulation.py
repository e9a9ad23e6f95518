"""Flower's simulation runtime, driven from outside of it.

The runtime wants to call a ServerApp; here a loop wants to call the runtime. So the ServerApp only
hands out its grid and waits until the loop is done with it.
"""

import logging
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fednorm.errors import SimulationError

_POLL = 0.2  # seconds


@contextmanager
def start_simulation(app: ClientApp, nodes: int) -> Iterator[Grid]:
    """Run `nodes` nodes in processes of this machine, one thread each, within the block."""
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
