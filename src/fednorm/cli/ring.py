"""`fednorm ring`."""

from pathlib import Path
from typing import Annotated

import typer

from fednorm.cli.options import console
from fednorm.experiment.ring import ring as on_the_ring
from fednorm.report.ring import ring_table, write_ring


def ring(
    out: Annotated[
        Path, typer.Option(help="folder for ring.json, figure1.png, figure2.png")
    ] = Path("results/ring"),
    rounds: Annotated[int, typer.Option(min=2, help="rounds of normalization")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="seed of the points")] = 0,
) -> None:
    """Draw Figures 1 and 2 of the paper on FBN: points on a ring under one layer.

    Ten clients, one class each; how far from centralized BatchNorm does each method normalise?
    """
    result = on_the_ring(rounds, seed)
    paths = write_ring(result, out)
    console.print(ring_table(result))
    console.print(f"Written: {', '.join(str(path) for path in paths)}", soft_wrap=True)
