"""`fednorm check` on what the package adds, and a run with all of it."""

import pytest
from typer.testing import CliRunner

import fednorm
from fednorm.cli import app


@pytest.mark.parametrize(
    "arguments",
    [
        ["alternating", "--fast"],
        ["alternating.strategy:Alternating(period=3)", "--fast"],
        ["midrange"],
        ["top2", "--kind", "metric"],
    ],
)
def test_keeps_the_contract(arguments: list[str]) -> None:
    """Call the command."""
    found = CliRunner().invoke(app, ["check", *arguments])
    assert found.exit_code == 0, found.output


def test_runs_by_its_names() -> None:
    """Run in worker processes."""
    found = fednorm.compare(
        [{"name": "alternating", "period": 3}, "fbn"],
        aggregator="nnm > midrange",
        byzantine=1,
        rounds=2,
        seeds=1,
        clients=5,
        workers=2,
    )
    assert [run.status for run in found.runs] == ["finished", "finished"]
