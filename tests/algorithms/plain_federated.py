"""Federated algorithms as their papers write them: plain, slow, in float64, on one flat vector.

An oracle for tests, written without a look at this project's own. The authors' code of FedNova and
FedDyn and Flower's strategies were read beside it; line and section numbers of the papers are from
memory. `clients` is the list of all N clients and
`chosen` the indices of those in the round (default: all). A `step` is one of `step_sgd` and
`step_adam` with its settings bound: `partial(step_sgd, lr=0.1)`; its state starts anew each round.
What an algorithm adds to a gradient (proximal term, control) is added before clipping, as if it
were part of the loss; weight decay comes after clipping, inside the step, as in torch.
"""
# ruff: noqa: PLR0913 (the papers' settings, by name)

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

Vector = np.ndarray
Step = Callable[[Vector, Vector, Any], tuple[Vector, Any]]


class Client(NamedTuple):
    """A client: its gradient at (w, step of this round), local steps E_k and examples n_k."""

    gradient: Callable[[Vector, int], Vector]
    steps: int
    weight: float = 1.0


def step_sgd(w, g, state=None, *, lr, momentum=0.0, weight_decay=0.0, nesterov=False):
    """Take a step as torch.optim.SGD: d = g + wd·w; b = d first, then ρb + d; w − lr·b.

    With Nesterov, w − lr·(d + ρb). Dampening is 0. The state is b.
    """
    d = g + weight_decay * w
    b = d if state is None else momentum * state + d
    return w - lr * (d + momentum * b if nesterov else b), b


def step_adam(w, g, state=None, *, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adamw=False):
    """Take a step as torch.optim.Adam, or AdamW (Loshchilov & Hutter, arXiv:1711.05101, alg. 2).

    Kingma & Ba, arXiv:1412.6980, alg. 1, with bias correction; ε is added outside the root, to the
    corrected √v̂. Adam adds the decay to the gradient; AdamW first scales w by 1 − lr·wd.
    The state is (m, v, t).
    """
    m, v, t = (np.zeros_like(w), np.zeros_like(w), 0) if state is None else state
    if adamw:
        w = w * (1 - lr * weight_decay)
    else:
        g = g + weight_decay * w
    t = t + 1
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g**2
    m_hat = m / (1 - betas[0] ** t)
    v_hat = v / (1 - betas[1] ** t)
    return w - lr * m_hat / (np.sqrt(v_hat) + eps), (m, v, t)


def clip_by_norm(g, max_norm):
    """Scale g by min(1, max_norm / (‖g‖ + 1e-6)), as torch's clip_grad_norm_; None: leave it."""
    if max_norm is None:
        return g
    return g * min(1.0, max_norm / (np.linalg.norm(g) + 1e-6))


def train_locally(w, client, *, step: Step, add=None, max_norm=None):
    """Run a client's E_k steps from w; `add(w)` is what an algorithm adds to the gradient."""
    w, state = np.array(w, dtype=np.float64), None
    for number in range(client.steps):
        g = client.gradient(w, number)
        if add is not None:
            g = g + add(w)
        w, state = step(w, clip_by_norm(g, max_norm), state)
    return w


def share_weights(clients, *, weighted=True):
    """Return p_k = n_k / Σ n over these clients, or 1/|S| each."""
    n = np.array([client.weight if weighted else 1.0 for client in clients], dtype=np.float64)
    return n / n.sum()


def average(vectors, shares):
    """Return Σ p_k v_k."""
    return sum(share * vector for share, vector in zip(shares, vectors, strict=True))


def choose(clients, chosen):
    """Return the indices of the round, all where none are given."""
    return list(range(len(clients))) if chosen is None else list(chosen)


def run_fedprox(w, clients, *, step: Step, mu=0.0, chosen=None, weighted=True, max_norm=None):
    """Run a round of FedProx (Li et al., arXiv:1812.06127, alg. 2); mu=0 is FedAvg.

    Each client takes steps on h_k(w) = F_k(w) + μ/2 ‖w − w^t‖², gradient + μ(w − w^t) (eq. 2).
    The paper samples clients with probability p_k and averages them plainly (alg. 2, line 7);
    `weighted` (default) averages by examples instead, as FedAvg does.
    """
    taken = [clients[k] for k in choose(clients, chosen)]
    ends = [
        train_locally(w, client, step=step, add=lambda v: mu * (v - w), max_norm=max_norm)
        for client in taken
    ]
    return average(ends, share_weights(taken, weighted=weighted))


def run_scaffold(
    w, c, controls, clients, *, lr, server_lr=1.0, chosen=None, option=2, weighted=False, **others
):
    """Run a round of SCAFFOLD (Karimireddy et al., arXiv:1910.06378, alg. 1).

    Line 10: y ← y − lr (g − c_i + c). Line 12: c_i⁺ = g_i(x) (option I; here the mean over the
    round's own batches of the gradients at x: the paper makes one pass over the local data) or
    c_i − c + (x − y) / (K_i lr) (option II, all the paper's experiments; K_i is the client's own).
    Lines 16-17: x ← x + server_lr · mean(y − x), c ← c + |S|/N · mean(c_i⁺ − c_i).
    The paper's means are unweighted. `weighted` makes both means by examples; then c moves by
    |S|/N (share_by "clients") or n_S/n ("examples", which alone keeps c = Σ n_i c_i / n).
    A `step` other than SGD at lr, or `max_norm`, is not the paper's: with momentum, Adam, decay or
    clipping (x − y)/(K lr) is not the mean gradient, and option II takes it as it is.
    Returns w, c and the list of all N controls.
    """
    assert set(others) <= {"step", "max_norm", "share_by"}, others
    step = others.get("step") or partial(step_sgd, lr=lr)
    max_norm, share_by = others.get("max_norm"), others.get("share_by", "clients")
    indices, controls = choose(clients, chosen), list(controls)
    moves, changes = [], []
    for k in indices:
        client, c_k = clients[k], controls[k]
        y = train_locally(w, client, step=step, add=lambda _, c_k=c_k: c - c_k, max_norm=max_norm)
        if option == 1:
            new = sum(client.gradient(w, s) for s in range(client.steps)) / client.steps
        else:
            new = c_k - c + (w - y) / (client.steps * lr)
        moves.append(y - w)
        changes.append(new - c_k)
        controls[k] = new
    taken = [clients[k] for k in indices]
    shares = share_weights(taken, weighted=weighted)
    part = len(taken) / len(clients)
    if share_by == "examples":
        part = sum(client.weight for client in taken) / sum(client.weight for client in clients)
    return w + server_lr * average(moves, shares), c + part * average(changes, shares), controls


def find_step_weights(steps, *, lr, momentum=0.0, mu=0.0):
    """Return FedNova's a_i: how far a unit gradient at each step moves the end, divided by lr.

    Found by sending one impulse at a time through local SGD. Momentum (§4.2): a_s =
    (1 − ρ^(τ−s)) / (1 − ρ), s = 0..τ−1, ‖a‖₁ = (τ − ρ(1 − ρ^τ)/(1 − ρ)) / (1 − ρ). Proximal: a_s =
    (1 − lr·μ)^(τ−1−s), ‖a‖₁ = (1 − (1 − lr·μ)^τ) / (lr·μ).
    """
    a = []
    for impulse in range(steps):
        u, b = 0.0, 0.0
        for s in range(steps):
            b = momentum * b + float(s == impulse) + mu * u
            u = u - lr * b
        a.append(-u / lr)
    return np.array(a)


def run_fednova(w, clients, *, lr, momentum=0.0, mu=0.0, tau_eff=None, chosen=None, max_norm=None):
    """Run a round of FedNova (Wang et al., arXiv:2007.07481, §4.1): x − τ_eff Σ p_i lr d_i.

    d_i = (x − x_i) / (lr ‖a_i‖₁), p_i = n_i / Σ n over the round's clients, momentum buffers start
    at zero each round. τ_eff is free in the paper; the default Σ p_i ‖a_i‖₁ is the authors' code
    where mu = 0; where mu ≠ 0 their code has Σ p_i τ_i: pass that as `tau_eff`. With both momentum
    and mu their code adds μ(w − x) after the buffer and counts a_i otherwise; here the proximal
    term is in the gradient, as in FedProx, and a_i is that of these very steps.
    """
    taken = [clients[k] for k in choose(clients, chosen)]
    p, step = share_weights(taken), partial(step_sgd, lr=lr, momentum=momentum)
    norms, directions = [], []
    for client in taken:
        end = train_locally(w, client, step=step, add=lambda v: mu * (v - w), max_norm=max_norm)
        norms.append(np.abs(find_step_weights(client.steps, lr=lr, momentum=momentum, mu=mu)).sum())
        directions.append((w - end) / (lr * norms[-1]))
    tau_eff = average(norms, p) if tau_eff is None else tau_eff
    return w - tau_eff * lr * average(directions, p)


def run_feddyn(
    w, h, gradients, clients, *, step: Step, alpha, chosen=None, weighted=False, max_norm=None
):
    """Run a round of FedDyn (Acar et al., arXiv:2111.04263, alg. 1); m is the number of clients.

    A client lowers L_k(θ) − ⟨g_k, θ⟩ + α/2 ‖θ − θ^(t−1)‖² (eq. 1; the paper: to its minimum; here
    E_k steps, as the authors' code), then g_k ← g_k − α (θ_k − θ^(t−1)). Clients not in the round
    keep theirs. Server: h ← h − α/m Σ_(k∈P) (θ_k − θ^(t−1)), over m and not |P|;
    θ = mean over P of θ_k, less h/α. All start at zero, so that h = mean of all g_k.
    The paper is unweighted. `weighted` is the authors' code: client k has α_k = α / (n_k m / Σ n),
    and the server's lines, its plain mean among them, stay as they are.
    The authors clip the gradient with g_k and −αθ^(t−1) in it but without +αθ (their weight decay).
    Returns w, h and the list of all m client gradients.
    """
    indices, gradients, m = choose(clients, chosen), list(gradients), len(clients)
    p = share_weights(clients, weighted=weighted)
    ends = []
    for k in indices:
        own, g_k = alpha / (p[k] * m), gradients[k]
        add = lambda v, own=own, g_k=g_k: own * (v - w) - g_k  # noqa: E731
        end = train_locally(w, clients[k], step=step, add=add, max_norm=max_norm)
        gradients[k] = g_k - own * (end - w)
        ends.append(end)
    h = h - alpha / m * sum(end - w for end in ends)
    return sum(ends) / len(ends) - h / alpha, h, gradients


def step_fedavgm(w, change, velocity=0.0, *, server_lr=1.0, momentum=0.9):
    """Take a server step of FedAvgM (Hsu et al., arXiv:1909.06335, §4.3): v ← βv + Δ, w + lr·v.

    Δ = Σ p_k (w_k − w) by examples, here with its sign turned. The paper has no server_lr; it is
    Reddi's. No (1 − β) on Δ. Flower 1.41 is the same. Returns w and the velocity.
    """
    velocity = momentum * velocity + change
    return w + server_lr * velocity, velocity


def step_fedopt(
    w, change, state=None, *, kind, server_lr, tau=1e-3, beta1=0.9, beta2=0.99, flower=False
):
    """Take a server step of FedAdagrad, FedYogi or FedAdam (Reddi, arXiv:2003.00295, alg. 2).

    `kind` is "adagrad", "yogi" or "adam". Δ is the mean of w_k − w (alg. 2: plain; their
    experiments: by examples: the caller decides). m = β1 m + (1 − β1) Δ from 0; v from Δ², not m²,
    starting at τ² (the paper asks v ≥ τ²); w + lr · m / (√v + τ). No bias correction. Their
    experiments have β1 = 0 for Adagrad, and their code starts Adagrad's and Yogi's v at 0.
    `flower`: as Flower 1.41, v starts at 0, and FedAdam alone (not Yogi, not Adagrad) has lr scaled
    by √(1 − β2^(t+1)) / (1 − β1^(t+1)) with t = 1 in the first round: one power more than Kingma &
    Ba; its FedAdagrad always has β1 = 0. The state is (m, v, rounds done).
    """
    if state is None:
        state = (np.zeros_like(w), np.full_like(w, 0.0 if flower else tau**2), 0)
    m, v, t = state
    t = t + 1
    m = beta1 * m + (1 - beta1) * change
    square = change**2
    if kind == "adagrad":
        v = v + square
    elif kind == "yogi":
        v = v - (1 - beta2) * square * np.sign(v - square)
    else:
        v = beta2 * v + (1 - beta2) * square
    if flower and kind == "adam":
        server_lr = server_lr * np.sqrt(1 - beta2 ** (t + 1)) / (1 - beta1 ** (t + 1))
    return w + server_lr * m / (np.sqrt(v) + tau), (m, v, t)
