"""The headline: true of the numbers whatever was run, and silent about noise."""

from dataclasses import replace

import pytest

from fednorm.experiment.results import PanelResult
from fednorm.report.format import describe_setting
from fednorm.report.ranking import write_headline
from report.report_cases import CONFIG, comparison, diverged, page, personal, run, told

BN = {"conversion": ("2 layers BatchNorm1d → FedBatchNorm1d",)}
CENTRALIZED, NAIVE = run("centralized", (0.9,)), run("naive", (0.5,), **BN)

HEADLINES = [
    ((), "Nothing was run"),
    ((CENTRALIZED, NAIVE), "BatchNorm loses 40 points"),
    ((CENTRALIZED, run("naive", (0.5,))), "naive loses 40 points"),  # layers are not known
    (
        (CENTRALIZED, NAIVE, run("fbn", (0.9,)), run("gn", (0.6,))),
        "BatchNorm loses 40 points; fbn wins them back",
    ),
    (
        (CENTRALIZED, NAIVE, run("fbn", (0.89,)), run("gn", (0.91,)), run("ln", (0.87,))),
        "BatchNorm loses 40 points; gn, fbn and ln win them back",
    ),
    (
        (CENTRALIZED, NAIVE, *(run(f"a long label {n}", (0.9,)) for n in range(4))),
        "BatchNorm loses 40 points; four methods win them back",
    ),
    (
        (CENTRALIZED, NAIVE, run("fbn", (0.85,))),  # seven eighths: less than nine tenths
        "BatchNorm loses 40 points; fbn wins back 35 points",
    ),
    (
        (CENTRALIZED, NAIVE, run("gn", (0.4,))),
        "BatchNorm loses 40 points, and no method clearly wins them back",
    ),
    (
        (CENTRALIZED, NAIVE, diverged("gn", (0.9,))),
        "BatchNorm loses 40 points",
    ),
    (
        (CENTRALIZED, NAIVE, personal("fedbn", (1.0, 0.9))),  # tested on other data
        "BatchNorm loses 40 points",
    ),
    (
        (CENTRALIZED, run("naive", (0.89,), tested=100, **BN), run("gn", (0.5,))),
        "BatchNorm keeps up with centralized training here",
    ),
    (
        (CENTRALIZED, run("naive", (0.7,), 0, **BN), run("naive", (0.95,), 1, **BN)),
        "BatchNorm ends 7.5 points below centralized training, which may be chance",
    ),
    (
        (run("centralized", (0.9,)), run("naive", (0.915,), **BN)),
        "BatchNorm ends 1.5 points above centralized training",
    ),
    (
        (CENTRALIZED, diverged("naive", (0.5,)), run("fbn", (0.8,)), run("gn", (0.7,))),
        "naive diverges; fbn ends highest with 80.0 %, 10 points above the next",
    ),
    ((run("naive", (0.5,)), run("fbn", (0.8,))), "fbn ends 30 points above naive"),
    (
        (run("naive", (0.5,)), run("fbn", (0.8,)), run("gn", (0.6,)), run("ln", (0.4,))),
        "fbn and gn end up to 30 points above naive",
    ),
    ((run("naive", (0.5,)), run("fbn", (0.4,))), "No method ends above naive"),
    ((NAIVE,), "naive ends at 50.0 %"),
    ((CENTRALIZED, run("fbn", (0.8,))), "fbn ends 10 points below centralized training"),
    (
        (CENTRALIZED, run("fbn", (0.89,), tested=100), run("gn", (0.9,), tested=100)),
        "gn and fbn end level with centralized training",
    ),
    ((CENTRALIZED,), "centralized ends at 90.0 %; no federated strategy was run"),
    ((CENTRALIZED, diverged("fbn")), "No federated strategy has a result"),
    ((diverged("naive"), diverged("fbn")), "No federated strategy has a result"),
    ((run("fbn", (0.8,)),), "fbn ends at 80.0 %"),
    (
        (run("fbn", (0.8,)), run("gn", (0.7,))),
        "fbn ends highest with 80.0 %, 10 points above the next",
    ),
    (
        (run("fbn", (0.8,)), run("fbn", (0.9,), 1), run("gn", (0.82,)), run("gn", (0.82,), 1)),
        "Two strategies end level at about 85.0 %",
    ),
    (
        (run("fbn", (0.8,)), run("gn", (0.8,)), run("ln", (0.2,))),
        "fbn and gn end highest, level at 80.0 %",
    ),
    (
        (personal("fedbn", (0.9, 0.7)), personal("silobn", (0.6, 0.6))),
        "fedbn ends highest with 80.0 % in the mean over clients, 20 points above the next",
    ),
]


@pytest.mark.parametrize(("runs", "expected"), HEADLINES)
def test_the_headline_is_true_of_the_numbers(runs, expected):
    assert write_headline(comparison(*runs)) == expected


def test_entries_with_different_attacks_are_not_told_as_methods():
    entries = [{"name": "naive", "byzantine": 3, "label": "naive, 3"}, {"name": "fbn"}]
    result = comparison(
        CENTRALIZED, run("naive, 3", (0.5,)), run("fbn", (0.8,)), config={"strategies": entries}
    )
    assert write_headline(result) == "Accuracy from 50.0 to 80.0 %, by strategy and setting"


def test_a_label_does_not_decide_what_a_strategy_is():
    entries = [{"name": "naive", "label": "plain"}, {"name": "fbn", "label": "not naive"}]
    result = comparison(
        run("plain", (0.5,)), run("not naive", (0.8,)), config={"strategies": entries}
    )
    assert write_headline(result) == "not naive ends 30 points above plain"


def test_the_page_of_a_comparison_has_the_headline_as_its_heading():
    html = page(comparison(CENTRALIZED, NAIVE, run("fbn", (0.9,))))
    assert "<h1>BatchNorm loses 40\u00a0points; fbn wins them back</h1>" in html
    assert '<p class="title">Which normalization survives these clients?</p>' in html


def test_a_smoke_run_says_that_its_numbers_mean_nothing():
    figure = told(PanelResult("γ = 0", comparison(CENTRALIZED, NAIVE)))
    assert "mean nothing" not in page(figure)
    assert "BatchNorm loses" in page(figure)
    smoke = page(replace(figure, smoke=True))
    assert "its numbers mean nothing" in smoke
    assert "BatchNorm loses" not in smoke


SETTINGS = [
    ([[5, 0, 0], [0, 4, 0], [0, 0, 3]], "3 clients, one digit each"),
    ([[50, 1, 0], [0, 4, 0], [0, 0, 3]], "3 clients, mostly one digit each"),
    ([[5, 5, 0], [0, 4, 4], [5, 0, 3]], "3 clients, 2 of 3 digits each"),
    ([[5, 5, 0], [0, 4, 0], [5, 0, 3]], "3 clients, 1 to 2 of 3 digits each"),
    ([[5, 5, 5], [1, 4, 4], [5, 0, 3]], "3 clients, sorted by label but for a share of 0.5"),
    ([[5] * 10] * 3, "3 clients, sorted by label but for a share of 0.5"),
    ([], "3 clients, sorted by label but for a share of 0.5"),
]


@pytest.mark.parametrize(("counts", "expected"), SETTINGS)
def test_the_setting_says_in_words_what_clients_have(counts, expected):
    config = {"clients": 3, "partition": "gamma=0.5", "data": {"name": "digits"}}
    assert describe_setting(config, counts) == f"{expected}; digits"


def test_the_setting_names_training_and_faults():
    config = {
        "clients": 10, "partition": "dirichlet=0.1", "participation": 0.5, "model": {"name": "mlp"},
        "data": {"name": "cifar10"}, "algorithm": {"name": "fedavg", "lr": 0.1}, "rounds": 1,
        "local_epochs": 2, "byzantine": 3, "attack": {"name": "alie"}, "client_dropout": 0.1,
        "privacy": {"clip": 1.0},
    }  # fmt: skip
    assert describe_setting(config) == (
        "10 clients, class mixes of a Dirichlet distribution (α = 0.1), 50 % of them per round; "
        "mlp on cifar10; 1 round of fedavg (lr 0.1), 2 local epochs per round; "
        "3 Byzantine clients (alie), 10 % of replies lost, differential privacy"
    )
    assert describe_setting({}) == ""
    assert describe_setting({"clients": 1, "model": {"name": "cnn", "layers": [1]}}) == (
        "1 client; cnn"
    )
    assert "(alpha 0.1)" in describe_setting(CONFIG)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ([{"partition": "iid"}, {"partition": "gamma=0"}], "mlp; 9 rounds of dsgd (lr 0.1)"),
        ([{"algorithm": {"lr": 0.5}}, {}], "sorted by label; mlp; 9 rounds of dsgd"),
        ([{"algorithm": {"lr": 0.1}}, {}], "sorted by label; mlp; 9 rounds of dsgd (lr 0.1)"),
        ([{"algorithm": {"name": "fedavg"}}], "sorted by label; mlp; 9 rounds"),
        ([{"rounds": 5, "model": {"name": "cnn"}}], "sorted by label"),
    ],
)
def test_the_setting_leaves_out_what_strategies_set_otherwise(own, expected):
    config = {
        "partition": "gamma=0", "model": {"name": "mlp"}, "rounds": 9,
        "algorithm": {"name": "dsgd", "lr": 0.1},
        "strategies": [{"name": "naive", **table} for table in own],
    }  # fmt: skip
    assert describe_setting(config) == expected
