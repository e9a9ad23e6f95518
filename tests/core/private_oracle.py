"""A private round in plain numpy, written from the description in docs/privacy.md alone.

Clients are dicts of arrays: `update` by parameter, `mean` and `var` by layer.
"""

import numpy as np

TINY = 1e-5  # added to variances, as BatchNorm does


def clip(vector, bound):
    length = np.sqrt(np.sum(vector**2))
    return vector if length <= bound else vector / length * bound


def noise_of(seed, round_, stream, size):
    return np.random.default_rng([seed, round_, stream]).standard_normal(size)


def flatten(arrays):
    return np.concatenate([np.asarray(a, np.float64).ravel() for a in arrays])


def sum_updates(clients, names, bound):
    """Sum of the clients' clipped updates, all parameters as one vector."""
    return sum(clip(flatten(c["update"][n] for n in names), bound) for c in clients)


def to_units(client, running, *, pooled):
    """A client's moments in units of the shared statistics, all layers as one vector."""
    parts = []
    for path, (r, v) in running.items():
        if path not in client["mean"]:
            parts += [np.zeros_like(r), np.zeros_like(r)]  # no change
            continue
        mu, var = client["mean"][path], client["var"][path]
        seen = var + (mu - r) ** 2 if pooled else var
        parts += [(mu - r) / np.sqrt(v + TINY), np.log((seen + TINY) / (v + TINY))]
    return flatten(parts)


def sum_statistics(clients, running, bound, *, pooled):
    """Sum of the clients' clipped moments."""
    return sum(clip(to_units(c, running, pooled=pooled), bound) for c in clients)


def private_means(clients, names, running, privacy, round_, *, pooled):
    """The noisy mean update, and the noisy mean and variance of every layer."""
    updates = sum_updates(clients, names, privacy["clip"])
    updates = updates + privacy["noise"] * privacy["clip"] * noise_of(
        privacy["seed"], round_, 801, updates.size
    )
    told = sum_statistics(clients, running, privacy["clip_statistics"], pooled=pooled)
    told = told + privacy["noise_statistics"] * privacy["clip_statistics"] * noise_of(
        privacy["seed"], round_, 802, told.size
    )
    updates, told = updates / privacy["clients"], told / privacy["clients"]
    layers, at = {}, 0
    for path, (r, v) in running.items():
        z, w = told[at : at + r.size], told[at + r.size : at + 2 * r.size]
        at += 2 * r.size
        seen = (v + TINY) * np.exp(w) - TINY
        var = seen - (v + TINY) * z**2 if pooled else seen
        layers[path] = r + np.sqrt(v + TINY) * z, np.maximum(var, 0)
    return updates, layers
