"""docs/fidelity.md: a row for every strategy, and no test that does not exist."""

import re
from pathlib import Path

import pytest

from fednorm.algorithms import ALGORITHMS
from fednorm.strategies import STRATEGIES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")
CITED = re.compile(r"`([\w/]+\.py)?(?:::(\w+))?`")


def cited():
    """Yield the file and function of every test that the page names; a bare name is the last's."""
    for row in PAGE.splitlines():
        path = None
        for found, name in CITED.findall(row):
            path = found or path
            if path and (found or name):
                yield path, name


def test_every_cited_test_exists():
    tests = sorted(set(cited()))
    assert len(tests) > 150
    for path, name in tests:
        text = (ROOT / "tests" / path).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in text, f"{path}::{name}"


@pytest.mark.parametrize("name", [*STRATEGIES, *ALGORITHMS])
def test_every_strategy_and_algorithm_has_a_row_with_a_test(name):
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
    _, _, paper, here, shown, deviation, _ = re.split(r"(?<!\\)\|", row)
    assert all(cell.strip() for cell in (paper, here, deviation))
    assert "::test_" in shown
