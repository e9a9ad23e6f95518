"""Validation data: a part of the training samples, which no client trains on."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fednorm.core.random_streams import Stream, make_rng
from fednorm.data import Dataset, load_dataset

SHARE, MOST = 5, 2000  # every fifth training sample is held out, at most 2000
LARGEST = 1e9  # bytes of data on disk that are used


def hold_out(of: Mapping[str, Any], seed: int) -> Dataset:
    """Return a data set whose test samples are a part of its training samples.

    They are spread evenly over the natural groups, or else over the labels.
    """
    data = load_dataset(of["name"], seed, **{k: v for k, v in of.items() if k != "name"})
    strata = data.labels() if data.groups is None else data.groups
    _, stratum, counts = np.unique(strata, return_inverse=True, return_counts=True)
    order = make_rng(seed, Stream.DOCTOR_BATCHES).permutation(len(stratum))
    order = order[np.argsort(stratum[order], kind="stable")]
    if data.on_disk:
        order = order[:: math.ceil(data.x.nbytes / LARGEST)]
    every = max(SHARE, math.ceil(len(order) / MOST))
    held = np.zeros(len(order), dtype=bool)
    held[every // 2 :: every] = counts[stratum[order[every // 2 :: every]]] > 1
    train, test = np.sort(order[~held]), np.sort(order[held])
    return replace(
        data,
        x=data.x[train],
        y=data.y[train],
        x_test=data.x[test],
        y_test=data.y[test],
        groups=None if data.groups is None else data.groups[train],
        groups_test=None if data.groups is None else data.groups[test],
        on_disk=False,
    )
