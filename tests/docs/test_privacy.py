"""docs/privacy.md: what a client would send as integers, and the bound of their rounding."""

import re

import pytest

from docs.pages import ROOT
from fednorm import ClientState, broadcast, client_round, create_algorithm
from fednorm.core.replies.secure_sum import (
    FRACTION,
    WIDE_FRACTION,
    WIDE_WORD,
    WORD,
    Encoding,
    count_calls,
)
from fednorm.core.round import reply_schema
from fednorm.models import create_model
from fednorm.strategies import STRATEGIES
from support import ToyClients, task_of

PAGE = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())


def describe(name):
    """Return what a client of `resnet` on 8×8 digits sends in a round, in numbers and in words."""
    task = task_of(
        name, create_algorithm("dsgd"), model=create_model("resnet", (1, 8, 8), 10, 0).double()
    )
    own = ToyClients(sizes=(8,), classes=10).batches(0, 1)
    reply, _ = client_round(task, broadcast(task, task.initial_state), ClientState(), own)
    moments = [m for report in reply.stats.values() for m in report.calls]
    numbers = (
        sum(t.numel() for t in reply.update.values()),
        sum(m.mean.numel() + m.var.numel() for m in moments),
    )
    if task.strategy.exchanges or not task.strategy.merges_sums:
        return *numbers, "refused", "refused"
    expected = reply_schema(task, task.initial_state)
    encoding = Encoding(expected, 2, "values", count_calls([reply], expected.running))
    encoded = encoding.encode(reply)
    return *numbers, len(encoded.tensors), len(encoded.statistics)


def table():
    rows = {}
    for name in STRATEGIES:
        rows.setdefault(describe(name), []).append(f"`{name}`")
    words = f"{WORD}-bit words | {WIDE_WORD}-bit words"
    head = f"| strategies | of weights, γ, β | of statistics | {words} |"
    lines = [f"| {' '.join(names)} | {' | '.join(map(str, row))} |" for row, names in rows.items()]
    return "\n".join([head, "|---|---|---|---|---|", *lines])


@pytest.mark.slow
def test_the_table_of_numbers_is_true():
    assert table() in PAGE, table()


@pytest.mark.slow
def test_the_words_are_those_of_the_code():
    assert f"2^{WORD}" in TEXT
    assert f"2^{WIDE_WORD}" in TEXT
    assert f"{FRACTION} bits of them are a fraction" in TEXT
    assert f"{WIDE_FRACTION} are a fraction" in TEXT
    (refused,) = re.findall(r"`(\w+)` and `(\w+)` are refused", TEXT)
    assert set(refused) == {n for n in STRATEGIES if describe(n)[2] == "refused"}


if __name__ == "__main__":
    print(table())  # noqa: T201
