"""Generated inputs that several test files draw from."""

from itertools import count

import numpy as np
import torch
from hypothesis import strategies as st

from fednorm.aggregators import check_client_count, create_aggregator
from fednorm.errors import TooFewClientsError


def aggregate(text, values, f):
    return create_aggregator(text, f)(values, torch.ones(len(values), dtype=torch.float64))


def least_vectors(text, f):
    """Return the smallest number of vectors that an aggregator takes."""
    return next(n for n in count(1) if not _is_too_few(text, f, n))


def _is_too_few(text, f, n):
    try:
        check_client_count(create_aggregator(text, f), n)
    except TooFewClientsError:
        return True
    return False


@st.composite
def crowds(draw, dtype=np.float64, text="krum"):
    """Draw honest vectors, f Byzantine ones of up to 1e30, and which are honest."""
    f = draw(st.integers(1, 4))
    honest = draw(st.integers(max(f + 3, least_vectors(text, f) - f), 14 + f))
    d = draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    truth = rng.normal(draw(st.sampled_from([0, 1, -40])), 1, (honest, d))
    sizes = st.sampled_from([0.0, 1.0, 3.5, 1e6, 1e30])
    false = [[draw(sizes) * draw(st.sampled_from([1, -1])) for _ in range(d)] for _ in range(f)]
    order = rng.permutation(honest + f)
    return torch.from_numpy(np.concatenate([truth, false])[order].astype(dtype)), f, order < honest


def only_honest(crowd, text="krum"):
    """Return the honest vectors alone, and the largest f that the aggregator takes for them."""
    values, f, honest = crowd
    values = values[honest]
    return values, max(g for g in range(f + 1) if not _is_too_few(text, g, len(values)))


@st.composite
def partition_problems(draw):
    """Draw labels (unbalanced, shuffled, not numbered from 0), groups, clients and a seed."""
    clients = draw(st.integers(1, 7))
    sizes = draw(st.lists(st.integers(2 * clients, 30), min_size=1, max_size=2 * clients))
    seed = draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(3 * np.arange(len(sizes)) + 5, sizes))
    groups = rng.permutation(np.arange(len(labels)) % draw(st.integers(clients, 2 * clients)))
    return labels, groups, clients, seed
