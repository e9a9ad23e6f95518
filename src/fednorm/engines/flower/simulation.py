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

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fednorm.errors import SimulationError

_LOOK = 0.2  # seconds


@contextmanager
def start_simulation(app: ClientApp, nodes: int) -> Iterator[Grid]:
    """Run so many nodes in processes of this machine, one thread each, within the block."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    grids: queue.Queue[Grid] = queue.Queue()
    done = threading.Event()
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        del context
        grids.put(grid)
        done.wait()

    thread = threading.Thread(
        target=run_simulation,
        kwargs={
            "server_app": server,
            "client_app": app,
            "num_supernodes": nodes,
            "backend_config": {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
        },
        daemon=True,
    )
    # Flower tells every step, and that its Python interface may go one day.
    flower = logging.getLogger("flwr")
    level = flower.level
    flower.setLevel(logging.ERROR)
    thread.start()
    try:
        yield _first(grids, thread)
    finally:
        done.set()
        thread.join()
        flower.setLevel(level)


def _first(grids: "queue.Queue[Grid]", thread: threading.Thread) -> Grid:
    while True:
        try:
            return grids.get(timeout=_LOOK)
        except queue.Empty:
            if not thread.is_alive():
                raise SimulationError(
                    "Flower's simulation runtime did not start; its messages say why."
                ) from None
