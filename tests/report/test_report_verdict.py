"""The verdict and what it must be read with."""

import pytest

from fednorm.report.verdict import list_caveats, state_verdict
from report.report_cases import CONFIG, comparison, diverged, page, personal, run

VERDICTS = [
    ((), "Nothing was run."),
    ((run("fbn", (0.8,)),), "fbn ends at 80.0 %."),
    (
        (run("fbn", (0.8,)), run("naive", (0.2,))),
        "fbn ends highest with 80.0 %, naive lowest with 20.0 %.",
    ),
    (
        (run("gn", (0.5,)), run("fbn", (0.8,)), run("naive", (0.2,)), diverged("ln", (0.9,))),
        (
            "fbn ends highest with 80.0 %, naive lowest with 20.0 %, "
            "of 3 federated strategies with a result."
        ),
    ),
    ((run("fbn", (0.8,)), run("gn", (0.8,))), "2 federated strategies end level at 80.0 %."),
    (
        (run("fbn", (0.8,)), run("gn", (0.8,)), run("naive", (0.2,))),
        (
            "fbn ends highest with 80.0 %, naive lowest with 20.0 %, of 3 federated strategies. "
            "gn is level with it."
        ),
    ),
    (
        (run("fbn", (0.8,)), run("fbn", (0.84,), 1), run("gn", (0.81,)), run("gn", (0.81,), 1)),
        (
            "fbn ends highest with 82.0 ± 2.8 %, gn lowest with 81.0 ± 0.0 %. "
            "Its lead over gn (1.0 points) is within the spread over seeds."
        ),
    ),
    (
        (run("fbn", (0.8,)), run("centralized", (0.83,))),
        "fbn ends at 80.0 %. fbn is 3.0 points below centralized (83.0 %).",
    ),
    (
        (run("fbn", (0.8,)), run("centralized:gn", (0.7,))),
        "fbn ends at 80.0 %. fbn is 10.0 points above centralized:gn (70.0 %).",
    ),
    (
        (run("fbn", (0.8,)), run("centralized", (0.8,))),
        "fbn ends at 80.0 %. fbn is level with centralized (80.0 %).",
    ),
    (
        (run("centralized", (0.8,)),),
        "No federated strategy was run. The reference centralized ends at 80.0 %.",
    ),
    ((diverged("fbn", (0.9,)), diverged("gn")), "No federated strategy has a result."),
    (
        (diverged("fbn", (0.9,)), run("gn", (0.5,))),
        "gn ends at 50.0 %, the only federated strategy with a result.",
    ),
    ((run("gn", (0.5,)), diverged("centralized", (0.9,))), "gn ends at 50.0 %."),
]


@pytest.mark.parametrize(("runs", "expected"), VERDICTS)
def test_the_verdict_is_true_of_the_numbers(runs, expected):
    assert state_verdict(comparison(*runs)) == expected


CAVEATS = [
    ((run("fbn", (0.8,)),), []),
    ((run("fbn", (0.8,)), run("fbn", (0.8,), 1)), []),
    ((run("fbn", (0.8,)), run("gn", (0.7,))), ["With one seed, small differences may be chance."]),
    ((diverged("fbn"), diverged("fbn", (), 1)), ["fbn diverged with every seed."]),
    ((diverged("fbn"),), ["fbn diverged."]),
    (
        (run("fbn", (0.8,)), diverged("fbn", (0.2,), 1)),
        ["fbn diverged with 1 of 2 seeds; its mean includes the last evaluation before that."],
    ),
    (
        (run("fbn", (0.8,)), diverged("fbn", (), 1)),
        ["fbn diverged with 1 of 2 seeds; its mean covers evaluated runs only."],
    ),
    (
        (run("fbn", (0.8,), status="interrupted"),),
        ["1 run was interrupted; the last evaluation counts."],
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("evaluate", "tested"),
    [("auto", "each on its own test split."), ("global", "each on all test samples.")],
)
def test_the_test_data_of_personal_models_are_named(evaluate, tested):
    config = {**CONFIG, "evaluate": evaluate}
    result = comparison(personal("fedbn", (0.9, 0.5)), config=config)
    (sentence,) = list_caveats(result)
    assert sentence.endswith(tested)
    assert sentence in page(result)
    assert f"{tested[:-1].replace('each', 'Each client')}, at the last" in page(result)


@pytest.mark.slow
@pytest.mark.parametrize(("runs", "expected"), CAVEATS)
def test_caveats_qualify_the_verdict(runs, expected):
    assert list_caveats(comparison(*runs)) == expected
    assert all(sentence in page(comparison(*runs)) for sentence in expected)
