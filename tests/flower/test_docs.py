"""What docs/deploy.md says is what happens."""

from pathlib import Path

from flower.what_leaves import table

DOCS = Path(__file__).parents[2] / "docs" / "deploy.md"


def test_the_table_of_what_leaves_a_client_is_true():
    assert table() in DOCS.read_text(encoding="utf-8")
