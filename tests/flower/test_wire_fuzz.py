"""Some hundred damaged messages; `benchmarks/wire_fuzz.py` sends as many as asked."""

import pytest

from flower.wire_fuzz import fuzz


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # numpy's, of headers that it reads
def test_no_damaged_message_ends_a_run_or_costs_an_honest_node():
    counts, crashes = fuzz(200, seed=5)
    assert crashes == []
    assert {outcome for _, outcome in counts} >= {"used", "rejected"}
    assert len({place for place, _ in counts}) >= 6
