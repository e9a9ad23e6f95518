"""Spread and significance against scipy, and tables of results in all their formats."""

import csv
import importlib
import re
from io import StringIO

import numpy as np
import pytest
from scipy import stats

import fednorm
from fednorm.errors import ConfigError, MissingPandasError
from fednorm.experiment.summary.result_table import escape_latex, make_table
from fednorm.experiment.summary.significance import (
    TableSpec,
    compute_p,
    correct_holm,
    find_quantile,
    find_tail,
    measure_spread,
    summarize_runs,
)
from report.report_cases import comparison, diverged, personal, run, three_strategies


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 30, 500])
def test_students_t_is_scipys(freedom):
    for t in (0.0, 1e-3, 0.3, 1.0, 2.0, 4.3, -12.0, 100.0, 1e4):
        assert find_tail(t, freedom) == pytest.approx(2 * stats.t.sf(abs(t), freedom), rel=1e-9)
    assert find_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_paired_tests_are_scipys(count):
    one, other = np.random.default_rng(count).normal([[0.5], [0.0]], size=(2, count))
    differences = list(one - other)
    assert compute_p(differences) == pytest.approx(stats.ttest_rel(one, other).pvalue, rel=1e-9)
    exact = stats.permutation_test(
        (one, other), lambda a, b: np.mean(a - b), permutation_type="samples", vectorized=False
    )
    assert compute_p(differences, "permutation") == pytest.approx(exact.pvalue)


def test_equal_differences_have_no_spread():
    assert compute_p([0.0, 0.0, 0.0]) == 1.0
    assert compute_p([0.1, 0.1, 0.1]) == 0.0
    assert compute_p([0.1, 0.1, 0.1], "permutation") == 2 / 2**3  # the smallest there is
    assert compute_p([0.1]) is None


def test_an_exact_test_of_many_seeds_is_refused():
    with pytest.raises(ConfigError, match="at most 20 seeds, but there are 21; use the t test"):
        compute_p([0.1] * 21, "permutation")


def test_spread_is_the_samples():
    values = [0.71, 0.74, 0.78, 0.7]
    assert measure_spread(values) == pytest.approx(np.std(values, ddof=1))
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert measure_spread(values, "ci95") == pytest.approx((high - low) / 2)
    assert measure_spread([0.7]) == measure_spread([]) == 0.0


def test_holm_never_orders_p_values_anew():
    assert correct_holm({"a": 0.04, "b": 0.01, "c": 0.03, "d": 0.5}) == pytest.approx(
        {"a": 0.09, "b": 0.04, "c": 0.09, "d": 0.5}
    )
    assert correct_holm({}) == {}


def test_strategies_are_paired_by_seed():
    """The order of seeds differs, and one is missing: only common ones count."""
    runs = comparison(
        *(run("naive", (value,), seed) for seed, value in enumerate((0.5, 0.6, 0.4))),
        *(run("fbn", (value,), seed) for seed, value in ((2, 0.55), (0, 0.68), (7, 0.1))),
    ).list_runs()
    _, fbn = summarize_runs(runs)
    assert (fbn["reference"], fbn["pairs"]) == ("naive", 2)
    assert fbn["difference"] == pytest.approx(0.165)
    assert fbn["p"] == pytest.approx(stats.ttest_rel([0.68, 0.55], [0.5, 0.4]).pvalue)
    assert fbn["spread"] == pytest.approx(np.std([0.55, 0.68, 0.1], ddof=1))


def test_what_cannot_be_compared_has_no_p():
    runs = (
        *(run("naive", (value,), seed) for seed, value in enumerate((0.5, 0.6))),
        *(personal("fedbn", (value, value), seed) for seed, value in enumerate((0.8, 0.9))),
        *(diverged("fbn", (value,), seed) for seed, value in enumerate((0.1, 0.2))),
    )
    rows = {row["strategy"]: row for row in summarize_runs(comparison(*runs).list_runs())}
    assert rows["fedbn"]["p"] is rows["fbn"]["p"] is rows["naive"]["p"] is None
    table = make_table(comparison(*runs).list_runs())
    assert [row[0] for row in table.rows] == ["naive", "fbn†", "fedbn"]
    assert table.apart == 2
    assert "† fbn: 2 of 2 runs diverged." in table.caption
    other = {"strategies": ["naive", {"name": "fbn", "partition": "iid"}]}
    mixed = comparison(runs[0], runs[1], run("fbn", (0.9,)), run("fbn", (0.8,), 1), config=other)
    assert summarize_runs(mixed.list_runs())[1]["p"] is None  # other data


def test_a_table_of_one_seed_has_neither_spread_nor_p():
    found = comparison(run("naive", (0.5,)), run("fbn", (0.8,)))
    table = make_table(found.list_runs())
    assert table.titles == ("strategy", "accuracy (%)", "Δ naive")
    assert table.rows[1] == ("fbn", "80.0", "+30.0")
    assert "one seed, so neither spread nor significance is known" in table.caption


def test_the_reference_is_naive_or_chosen():
    runs = three_strategies().list_runs()
    assert make_table(runs).titles[2:] == ("Δ naive", "p")
    assert make_table(runs, TableSpec(against="fbn")).titles[2:] == ("Δ fbn", "p")
    assert make_table(runs, TableSpec(test="none")).titles[2:] == ("Δ naive",)
    without = [row for row in runs if row["strategy"] != "naive"]
    assert make_table(without).titles == ("strategy", "accuracy (%)")
    with pytest.raises(
        ConfigError, match="no strategy 'gn' to compare with; there are centralized"
    ):
        make_table(runs, TableSpec(against="gn"))


def check_latex(text):
    """Parse a booktabs table: braces close, rows have the columns, specials are escaped."""
    plain = text.replace(r"\{", "").replace(r"\}", "")
    assert plain.count("{") == plain.count("}")
    assert plain.count("$") - plain.count(r"\$") == 2 * len(re.findall(r"(?<!\\)\$[^$]*\$", plain))
    body = text.split(r"\toprule")[1].split(r"\bottomrule")[0].replace(r"\midrule", "")
    rows = [row for row in body.strip().split(r" \\") if row.strip()]
    columns = len(re.search(r"\{tabular\}\{(\w+)\}", text)[1])
    assert {len(re.split(r"(?<!\\)&", row)) for row in rows} == {columns}
    assert re.findall(r"(?<!\\)[%#_]", text.replace("% \\usepackage", "")) == []
    return rows


def test_latex_escapes_labels_and_names_its_numbers():
    label = r"gn_ws & 50% #1 $x$ {a} ~b^2 \c"
    runs = (run(name, (v,), s) for name in ("naive", label) for s, v in enumerate((0.5, 0.7)))
    text = comparison(*runs).to_latex()
    rows = check_latex(text)
    escaped = escape_latex(label)
    assert escaped == (
        r"gn\_ws \& 50\% \#1 \$x\$ \{a\} \textasciitilde{}b\textasciicircum{}2 \textbackslash{}c"
    )
    assert escaped in rows[2]
    assert r"60.0 $\pm$ 14.1" in rows[2]
    caption = re.search(r"\\caption\{(.*)\}", text)[1]
    for told in ("after 10 rounds", "sample standard deviation over n = 2 seeds", "paired t test"):
        assert told in caption
    assert "95 \\% confidence interval" in three_strategies().to_latex(spread="ci95")
    check_latex(three_strategies().to_latex(test="permutation", against="centralized"))


def test_csv_has_rows_of_runs_rounds_and_strategies(tmp_path):
    found = three_strategies()
    runs = list(csv.DictReader(StringIO(found.to_csv(tmp_path / "runs.csv"))))
    assert (tmp_path / "runs.csv").read_text() == found.to_csv()
    assert [(row["strategy"], row["seed"]) for row in runs[2:4]] == [("fbn", "0"), ("fbn", "1")]
    assert (runs[2]["accuracy"], runs[2]["name"], runs[2]["status"]) == ("0.8", "fbn", "finished")
    rounds = list(csv.DictReader(StringIO(found.to_csv(rows="rounds"))))
    assert [(row["round"], row["accuracy"]) for row in rounds[:2]] == [
        ("10", "0.5"),
        ("20", "0.82"),
    ]
    strategies = list(csv.DictReader(StringIO(found.to_csv(rows="strategies"))))
    assert float(strategies[1]["spread"]) == pytest.approx(np.std([0.8, 0.82], ddof=1))
    assert found.runs[2].to_csv(rows="rounds").count("\n") == 3
    with pytest.raises(ConfigError, match="rows must be 'runs', 'rounds' or 'strategies'"):
        found.to_csv(rows="seeds")


def test_an_r2_below_zero_is_written_as_in_the_report():
    runs = comparison(run("fbn", (-1e9,)), run("gn", (-0.25,)), run("naive", (0.5,)))
    text = runs.to_latex(against="naive")
    assert r"gn & $-$25.0 & $-$75.0 \\" in text
    assert r"fbn & $<$ $-$1000 & $<$ $-$1000 \\" in text


def test_notebooks_show_a_table():
    html = comparison(run("<b>", (0.5,)), run("fbn", (0.8,)))._repr_html_()
    assert "&lt;b&gt;" in html
    assert "<td><b>fbn</b></td><td><b>80.0</b></td>" in html
    assert comparison()._repr_html_() == "<p>no runs</p>"
    assert "80.0" in run("fbn", (0.8,))._repr_html_()


def test_print_shows_a_table():
    label, naive, fbn, *_ = str(comparison(run("naive", (0.5,)), run("fbn", (0.8,)))).splitlines()
    assert label == "strategy  accuracy (%)  Δ naive"
    assert {naive, fbn} == {"naive             50.0        –", "fbn               80.0    +30.0"}
    assert str(comparison()) == "no runs"


@pytest.mark.slow
def test_rows_become_a_frame_of_pandas():
    pandas = pytest.importorskip("pandas")
    frame = three_strategies().to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.groupby("strategy").accuracy.mean().round(3).to_dict() == {
        "centralized": 0.83, "fbn": 0.81, "naive": 0.18,
    }  # fmt: skip
    assert len(three_strategies().runs[0].to_pandas(rows="rounds")) == 2


def test_the_error_without_pandas_says_what_to_install(monkeypatch):
    real = importlib.import_module

    def find(name, *rest):
        if name == "pandas":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", find)
    with pytest.raises(MissingPandasError, match=r'pip install ".\[pandas\]"'):
        three_strategies().to_pandas()


@pytest.mark.slow
def test_results_of_the_api_are_tables():
    found = fednorm.compare(["naive", "fbn"], rounds=2, seeds=2, clients=3)
    rows = check_latex(found.to_latex())
    assert [row.split(" & ")[0].strip().removeprefix(r"\textbf{").rstrip("}") for row in rows] == [
        "strategy", "naive", "fbn",
    ]  # fmt: skip
    assert found.to_csv().count("\n") == 5
