"""Published against measured: gaps, and which pairs keep their order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednorm.experiment.results import PanelResult
from fednorm.report.verdict import Pair, compare_published
from report.report_cases import comparison, diverged, run

SAME = "Same order of methods as published."


def panel(published, **measured):
    """Make a panel from per cent: a number, or one for each seed."""
    runs = [
        run(label, (value / 100,), seed)
        for label, values in measured.items()
        for seed, value in enumerate(values if isinstance(values, tuple) else (values,))
    ]
    return PanelResult("", comparison(*runs), published)


def orders(found):
    return {(pair.above, pair.below): pair.order for pair in found.pairs}


def test_without_published_numbers_there_is_nothing_to_say():
    assert compare_published(panel({}, fbn=80, gn=70)) is None


def test_rows_hold_both_numbers_and_the_gap():
    found = compare_published(panel({"fbn": 90.5, "paper": 12.0}, fbn=(78, 82), gn=70))
    fbn, gn, paper = found.rows
    assert (fbn.label, fbn.published, fbn.seeds) == ("fbn", 90.5, 2)
    assert (fbn.measured, fbn.spread, fbn.gap) == pytest.approx((80, 8**0.5, -10.5))
    assert (gn.published, gn.measured, gn.gap) == (None, 70, None)
    assert (paper.label, paper.published, paper.measured, paper.gap) == ("paper", 12.0, None, None)
    assert found.pairs == ()
    assert "Fewer than two methods" in found.describe()


STATEMENTS = [
    (panel({"a": 90, "b": 80, "c": 10}, c=5, a=70, b=60), SAME),
    (panel({"a": 90, "b": 80, "c": 10}, a=60, b=70, c=5), "Not the published order: b is above a."),
    (
        panel({"a": 90, "b": 80, "c": 10}, a=10, b=20, c=30),
        "Not the published order: b is above a; c is above a; c is above b.",
    ),
    (panel({"a": 80.4, "b": 79.9}, a=60, b=70), "Too close to call: a and b."),  # 0.5 points
    (panel({"a": 80.5, "b": 79.9}, a=60, b=70), "Not the published order: b is above a."),
    (panel({"a": 90, "b": 80}, a=70, b=70), "Too close to call: a and b."),
    (
        panel({"a": 90, "b": 80}, a=(68, 70, 72), b=72),
        "Too close to call: a and b.",
    ),  # one deviation
    (panel({"a": 90, "b": 80}, a=(68, 70, 72), b=72.1), "Not the published order: b is above a."),
    (panel({"a": 90, "b": 80}, a=75, b=(68, 70, 72)), SAME),
    (
        panel({"a": 90, "b": 89.8, "c": 10}, a=60, b=70, c=5),
        "2 of 3 pairs of methods in the published order. Too close to call: a and b.",
    ),
    (
        panel(dict.fromkeys("abcd", 50), a=1, b=2, c=3, d=4),
        "Too close to call: a and b; a and c; a and d; b and c; 2 more pairs.",
    ),
]


@pytest.mark.parametrize(("of", "expected"), STATEMENTS)
def test_the_statement_is_true_of_the_pairs(of, expected):
    assert compare_published(of).describe() == expected


def test_the_standard_error_of_one_seed_depends_on_its_test_samples():
    """At 50 % of 400 samples, one standard error is 2.5 points."""
    close = comparison(run("a", (0.52,), tested=400), run("b", (0.5,), tested=400))
    many = comparison(run("a", (0.52,), tested=40000), run("b", (0.5,), tested=40000))
    published = {"a": 90.0, "b": 80.0}
    assert (
        compare_published(PanelResult("", close, published)).describe()
        == "Too close to call: a and b."
    )
    assert compare_published(PanelResult("", many, published)).describe() == SAME


STDS = [
    ({"a": 54.5, "b": 54.0}, {"b": 4.2}, "Too close to call: a and b."),
    ({"a": 58.2, "b": 54.0}, {"b": 4.2}, "Too close to call: a and b."),  # exactly one deviation
    ({"a": 58.3, "b": 54.0}, {"b": 4.2}, "Not the published order: b is above a."),
    ({"a": 58.2, "b": 54.0}, {"a": 4.2}, "Too close to call: a and b."),
    ({"a": 55.0, "b": 54.0}, {"a": 0.2, "b": 0.4}, "Not the published order: b is above a."),
    ({"a": 54.4, "b": 54.0}, {"a": 0.2, "b": 0.3}, "Too close to call: a and b."),  # half a point
]


@pytest.mark.parametrize(("published", "std", "expected"), STDS)
def test_published_numbers_within_their_standard_deviation_have_no_order(published, std, expected):
    runs = comparison(run("a", (0.6,)), run("b", (0.7,)))
    found = compare_published(PanelResult("", runs, published, published_std=std))
    assert found.describe() == expected
    assert [row.published_std for row in found.rows] == [std.get("a"), std.get("b")]


def test_published_maxima_are_compared_with_maxima():
    runs = comparison(run("a", (0.8, 0.3)), run("b", (0.5, 0.6)))
    published = {"a": 90.0, "b": 80.0}
    assert compare_published(PanelResult("", runs, published)).rows[0].measured == pytest.approx(
        30.0
    )
    best = compare_published(PanelResult("", runs, published, best=True))
    assert best.rows[0].measured == pytest.approx(80.0)
    assert best.describe() == SAME


def test_a_method_that_diverged_with_every_seed_has_no_place_in_the_order():
    runs = (run("a", (0.5,)), diverged("b", (0.9,)), run("c", (0.4,)))
    found = compare_published(PanelResult("", comparison(*runs), {"a": 80, "b": 60, "c": 70}))
    assert found.rows[1].measured is None
    assert found.pairs == (Pair("a", "c", "same"),)


@pytest.mark.parametrize("published", [float("nan"), float("inf")])
def test_missing_published_numbers_are_left_out(published):
    found = compare_published(panel({"a": published, "b": 80, "c": 70}, a=60, b=70, c=60))
    assert found.rows[0].published is None
    assert orders(found) == {("b", "c"): "same"}


numbers = st.integers(0, 100).map(float)


@given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(numbers, numbers), min_size=1))
def test_every_pair_agrees_with_a_slow_oracle(methods):
    published = {label: pair[0] for label, pair in methods.items()}
    measured = {label: pair[1] for label, pair in methods.items()}
    found = compare_published(panel(published, **measured))
    assert len(found.pairs) == len(methods) * (len(methods) - 1) // 2
    for (above, below), order in orders(found).items():
        assert published[above] >= published[below]
        if published[above] == published[below] or measured[above] == measured[below]:
            assert order == "too close to call"
        else:
            assert order == ("same" if measured[above] > measured[below] else "swapped")


def test_json_has_rows_pairs_and_the_statement():
    record = compare_published(panel({"a": 90, "b": 80}, a=60, b=70)).to_json()
    assert record["statement"] == "Not the published order: b is above a."
    assert record["rows"][0] == {
        "label": "a",
        "published": 90,
        "published_std": None,
        "measured": 60,
        "spread": 0,
        "seeds": 1,
        "gap": -30,
    }
    assert record["pairs"] == [{"above": "a", "below": "b", "order": "swapped"}]
