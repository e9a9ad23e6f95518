"""FBN's Figures 1 and 2: points on a ring, normalised by one layer."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from fednorm.cli import app
from fednorm.reproduce.ring import (
    CLIENTS,
    GAMMAS,
    MOMENTUM,
    POINTS,
    build_ring_table,
    draw_points,
    normalize,
    run_ring,
)

pytestmark = pytest.mark.slow
EPS = 1e-5


@pytest.fixture(scope="module")
def result():
    return run_ring()


def errors(result, method, late=False):
    return [o.late_error if late else o.error for o in result.select(method)]


def test_fbn_is_near_the_centralized_points_at_every_level(result):
    assert [o.gamma for o in result.select("fbn")] == list(GAMMAS)
    assert max(errors(result, "fbn", late=True)) < 0.1
    assert max(errors(result, "fbn")) < 0.3  # with the rounds that forget mean 0 and variance 1


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("method", ["naive", "fixbn"])
def test_the_errors_of_other_methods_grow_with_heterogeneity(result, method, late):
    found = errors(result, method, late)
    assert found == sorted(found, reverse=True)
    assert found[0] > 5 * found[-1]


def test_other_methods_are_farther_from_the_centralized_points_than_fbn(result):
    fbn, naive, fixbn = (errors(result, m, late=True) for m in ("fbn", "naive", "fixbn"))
    assert all(other > 2.5 * own for other, own in zip(naive, fbn, strict=True))
    assert naive[0] > 50 * fbn[0]
    # Without heterogeneity FixBN's variance has no bias, so it is as good as FBN there.
    assert all(o > 3 * f for o, f, g in zip(fixbn, fbn, GAMMAS, strict=True) if g <= 0.5)
    assert fixbn[0] > 300 * fbn[0]


def test_the_reference_normalizes_a_round_by_its_own_statistics(result):
    assert all(error == 0 for o in result.select("centralized") for error in o.error_by_round)
    before = result.before.numpy()
    expected = (before - before.mean(0)) / np.sqrt(before.var(0) + EPS)
    np.testing.assert_allclose(result.select("centralized")[0].last.numpy(), expected, atol=1e-12)


def slow(method, x):
    """Normalise `[rounds, clients, points, 2]` as the method's definition says, in numpy."""
    mean, var, rounds = np.zeros(2), np.ones(2), []
    for number, points in enumerate(x, start=1):
        own_mean, own_var = points.mean(1, keepdims=True), points.var(1, keepdims=True)
        frozen = method == "fixbn" and number > len(x) / 2
        if frozen or method == "fbn":
            rounds.append((points - mean) / np.sqrt(var + EPS))
        else:
            rounds.append((points - own_mean) / np.sqrt(own_var + EPS))
        if frozen:
            continue
        if method == "fbn":
            together = points.reshape(-1, 2)
            new_mean, new_var = together.mean(0), together.var(0, ddof=1)
        else:
            new_mean, new_var = own_mean.mean((0, 1)), points.var(1, ddof=1).mean(0)
        mean = (1 - MOMENTUM) * mean + MOMENTUM * new_mean
        var = (1 - MOMENTUM) * var + MOMENTUM * new_var
    return np.stack(rounds), mean, var


@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("method", ["naive", "fixbn", "fbn"])
def test_methods_against_their_definition(method, gamma):
    draws = draw_points(gamma, rounds=12, seed=3)
    found, running = normalize(method, draws)
    points, mean, var = slow(method, draws.x.numpy())
    np.testing.assert_allclose(found.numpy(), points.reshape(12, -1, 2), atol=1e-10)
    np.testing.assert_allclose(running.mean.numpy(), mean, atol=1e-10)
    np.testing.assert_allclose(running.var.numpy(), var, rtol=1e-10)


def test_final_statistics_of_fbn_are_the_pooled_moving_average(result):
    for outcome in result.select("fbn"):
        _, mean, var = slow("fbn", draw_points(outcome.gamma, result.rounds, result.seed).x.numpy())
        np.testing.assert_allclose(outcome.mean, mean, atol=1e-10)
        np.testing.assert_allclose(outcome.variance, var, rtol=1e-10)
        assert min(outcome.variance) > 40  # the ring's own: radius² / 2 + 1 = 51


def test_fixbn_misses_the_variance_between_clients(result):
    assert max(result.select("fixbn")[0].variance) < 1.2
    spread = (
        result.select("fixbn")[0].last.norm(dim=1).mean()
        / result.select("fbn")[0].last.norm(dim=1).mean()
    )
    assert spread > 6  # √51 = 7.1


@pytest.mark.parametrize(("gamma", "own"), [(0.0, POINTS), (0.5, POINTS / 2), (1.0, 0)])
def test_gamma_is_the_share_of_points_from_all_classes(gamma, own):
    draws = draw_points(gamma, rounds=50, seed=1)
    assert draws.x.shape == (50, CLIENTS, POINTS, 2)
    mine = (draws.y == np.arange(CLIENTS)[:, None]).double().sum(2).mean()
    assert float(mine) == pytest.approx(own + (POINTS - own) / CLIENTS, abs=0.3)
    assert not (draws.x[0] == draws.x[1]).any()  # drawn anew each round
    assert (draws.x == draw_points(gamma, rounds=50, seed=1).x).all()
    assert (draws.x != draw_points(gamma, rounds=50, seed=2).x).all()


def test_the_command_writes_numbers_and_figures(tmp_path):
    arguments = ["ring", "--out", str(tmp_path / "r"), "--rounds", "6", "--seed", "5"]
    called = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})
    assert called.exit_code == 0, called.output
    assert "figure2.png" in called.output
    assert "fixbn" in called.output
    assert {p.name for p in (tmp_path / "r").iterdir()} == {
        "ring.json",
        "figure1.png",
        "figure2.png",
    }
    for name in ("figure1.png", "figure2.png"):
        content = (tmp_path / "r" / name).read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        assert len(content) > 20_000
    record = json.loads((tmp_path / "r" / "ring.json").read_text())
    assert (record["setting"]["rounds"], record["setting"]["seed"]) == (6, 5)
    again = run_ring(rounds=6, seed=5)
    assert [o["error"] for o in record["outcomes"]] == [o.error for o in again.outcomes]
    assert len(record["outcomes"]) == 4 * len(GAMMAS)
    assert all(len(o["error_by_round"]) == 6 for o in record["outcomes"])
    assert record["last_round"]["after"]["fbn"] == again.select("fbn")[0].last.tolist()
    assert len(record["last_round"]["labels"]) == CLIENTS * POINTS


def test_the_table_has_two_rows_for_each_federated_method(result):
    assert build_ring_table(result).row_count == 6
