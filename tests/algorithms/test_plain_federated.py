"""The plain algorithms are right where the answer is known without them."""

from functools import partial

import numpy as np
import pytest
import torch

from algorithms.plain_federated import (
    Client,
    clip_by_norm,
    find_step_weights,
    run_feddyn,
    run_fednova,
    run_fedprox,
    run_scaffold,
    step_adam,
    step_fedavgm,
    step_fedopt,
    step_sgd,
    train_locally,
)

START = np.array([3.0, -2.0, 0.5])
SGD = partial(step_sgd, lr=0.05)


def make_quadratics(steps, weights):
    """Clients with losses (w − b)ᵀA(w − b)/2 of their own, and the optimum of their mean."""
    rng = np.random.default_rng(0)
    clients, left, right = [], 0.0, 0.0
    for count, weight in zip(steps, weights, strict=True):
        half = rng.normal(size=(3, 3))
        a, b = half @ half.T + 0.5 * np.eye(3), rng.normal(size=3)
        clients.append(Client(lambda w, _, a=a, b=b: a @ (w - b), count, weight))
        left, right = left + weight * a, right + weight * a @ b
    return clients, np.linalg.solve(left, right)


EVEN, EVEN_BEST = make_quadratics([5, 5, 5, 5], [1, 1, 1, 1])
ODD, ODD_BEST = make_quadratics([2, 5, 9, 4], [1, 2, 3, 4])


def zeros(clients):
    return [np.zeros(3) for _ in clients]


def repeat_fedavg(clients, rounds=300):
    w = START
    for _ in range(rounds):
        w = run_fedprox(w, clients, step=SGD)
    return w


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("mu", [0.0, 0.3])
def test_fednova_with_equal_steps_is_fedavg(momentum, mu):
    clients = [client._replace(steps=4) for client in ODD]
    step = partial(step_sgd, lr=0.05, momentum=momentum)
    expected = run_fedprox(START, clients, step=step, mu=mu)
    found = run_fednova(START, clients, lr=0.05, momentum=momentum, mu=mu)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_step_weights_are_the_papers_closed_forms():
    rho, tau, lr, mu = 0.9, 7, 0.05, 0.3
    norm = find_step_weights(tau, lr=lr, momentum=rho).sum()
    np.testing.assert_allclose(norm, (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho))
    norm = find_step_weights(tau, lr=lr, mu=mu).sum()
    np.testing.assert_allclose(norm, (1 - (1 - lr * mu) ** tau) / (lr * mu))
    np.testing.assert_allclose(find_step_weights(tau, lr=lr), np.ones(tau))


def test_fednova_divides_unequal_steps_out():
    """Where gradients are constant, the move is τ_eff times the weighted mean gradient."""
    pulls = np.array([[1.0, 0, 0], [0, 2.0, 0]])
    clients = [Client(lambda _, __, g=g: g, n, n) for g, n in zip(pulls, (2, 6), strict=True)]
    found = run_fednova(START, clients, lr=0.1)
    expected = START - 0.1 * (0.25 * 2 + 0.75 * 6) * (0.25 * pulls[0] + 0.75 * pulls[1])
    np.testing.assert_allclose(found, expected)


def test_the_first_round_of_scaffold_is_fedavg():
    found, _, _ = run_scaffold(START, np.zeros(3), zeros(ODD), ODD, lr=0.05)
    np.testing.assert_allclose(found, run_fedprox(START, ODD, step=SGD, weighted=False))


def test_fedavg_and_fedprox_miss_the_optimum():
    assert np.abs(repeat_fedavg(EVEN) - EVEN_BEST).max() > 1e-2
    w = START
    for _ in range(300):
        w = run_fedprox(w, EVEN, step=SGD, mu=0.5)
    assert 1e-3 < np.abs(w - EVEN_BEST).max() < np.abs(repeat_fedavg(EVEN) - EVEN_BEST).max()


@pytest.mark.parametrize("option", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_scaffold_reaches_the_optimum(option, weighted):
    """Unweighted with half of the clients each round; by examples with all, steps unequal."""
    clients, best = (ODD, ODD_BEST) if weighted else (EVEN, EVEN_BEST)
    w, c, controls = START, np.zeros(3), zeros(clients)
    for number in range(1200):
        chosen = None if weighted else [number % 4, (number + 1) % 4]
        w, c, controls = run_scaffold(
            w, c, controls, clients, lr=0.02, chosen=chosen, option=option, weighted=weighted
        )
    np.testing.assert_allclose(w, best, atol=1e-6)


def test_scaffolds_c_stays_the_mean_of_all_controls():
    for weighted, share_by in ((False, "clients"), (True, "examples")):
        w, c, controls = START, np.zeros(3), zeros(ODD)
        for chosen in ([0, 2], [1], [3, 0, 1]):
            w, c, controls = run_scaffold(
                w, c, controls, ODD, lr=0.02, chosen=chosen, weighted=weighted, share_by=share_by
            )
        n = [client.weight if weighted else 1 for client in ODD]
        np.testing.assert_allclose(c, np.average(controls, axis=0, weights=n))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("partial_rounds", [False, True])
def test_feddyn_reaches_the_optimum(weighted, partial_rounds):
    clients, best = (ODD, ODD_BEST) if weighted else (EVEN, EVEN_BEST)
    clients = [client._replace(steps=60) for client in clients]
    w, h, gradients = START, np.zeros(3), zeros(clients)
    for number in range(150):
        chosen = [number % 4, (number + 1) % 4] if partial_rounds else None
        w, h, gradients = run_feddyn(
            w, h, gradients, clients, step=SGD, alpha=2.0, chosen=chosen, weighted=weighted
        )
    np.testing.assert_allclose(w, best, atol=1e-6)
    n = [client.weight if weighted else 1 for client in clients]
    np.testing.assert_allclose(h, np.average(gradients, axis=0, weights=n), atol=1e-12)


TORCH = {
    "sgd": (torch.optim.SGD, step_sgd, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": (torch.optim.SGD, step_sgd, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, step_adam, {"lr": 0.05, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, step_adam, {"lr": 0.05, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("max_norm", [None, 0.7])
def test_local_steps_are_torchs(name, max_norm):
    optimizer, step, settings = TORCH[name]
    w = torch.tensor(START, requires_grad=True)
    peer = optimizer([w], **settings)
    for number in range(6):
        w.grad = torch.from_numpy(ODD[0].gradient(w.detach().numpy(), number))
        if max_norm:
            torch.nn.utils.clip_grad_norm_([w], max_norm)
        peer.step()
    bound = partial(step, **settings, **({"adamw": True} if name == "adamw" else {}))
    found = train_locally(START, ODD[0]._replace(steps=6), step=bound, max_norm=max_norm)
    np.testing.assert_allclose(found, w.detach().numpy(), rtol=1e-10)


def test_short_gradients_are_not_clipped():
    np.testing.assert_array_equal(clip_by_norm(START, 100.0), START)
    np.testing.assert_allclose(np.linalg.norm(clip_by_norm(START, 1.0)), 1.0, rtol=1e-6)


def test_fedavgm_without_momentum_is_fedavg():
    change = run_fedprox(START, ODD, step=SGD) - START
    np.testing.assert_allclose(
        step_fedavgm(START, change, momentum=0.0)[0], run_fedprox(START, ODD, step=SGD)
    )
    w, velocity = step_fedavgm(START, change, momentum=0.5)
    w, _ = step_fedavgm(w, change, velocity, momentum=0.5)
    np.testing.assert_allclose(w, START + 2.5 * change)


def test_the_first_step_of_fedopt_by_hand():
    change, tau = np.array([0.2, -0.1, 0.0]), 0.1
    settings = {"server_lr": 0.5, "tau": tau, "beta1": 0.9, "beta2": 0.99}
    # The first v: Adagrad τ² + Δ²; Adam 0.99τ² + 0.01Δ²; Yogi τ² + 0.01Δ² where Δ² > τ², else
    # τ² − 0.01Δ²; where Δ² = τ² the sign is 0.
    v = {
        "adagrad": [0.05, 0.02, 0.01],
        "adam": [0.0103, 0.01, 0.0099],
        "yogi": [0.0104, 0.01, 0.01],
    }
    for kind, expected in v.items():
        w, (m, found, _) = step_fedopt(START, change, kind=kind, **settings)
        np.testing.assert_allclose(m, 0.1 * change)
        np.testing.assert_allclose(found, expected, atol=1e-10)
        np.testing.assert_allclose(w, START + 0.05 * change / (np.sqrt(expected) + tau))
