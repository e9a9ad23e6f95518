"""The random streams of a run: one number for each purpose, so that equal seeds give other draws.

A generator is seeded with the run's seed, what it draws for (client, round, step) and its stream.
"""

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """What random numbers are drawn for.

    Every result depends on these numbers: they never change. Some purposes share a number, as
    giving them another one would change published results; their seeds differ in length or they
    are never drawn in one run.
    """

    DIGITS_SPLIT = 101
    RING_POINTS = 102
    SCENES = 103
    TRAIN_SUBSET = SCENES  # of image files, which no data set of scenes has
    TEST_SUBSET = 104
    FOLDER_SPLIT = 105
    FEMNIST_SPLIT = 107
    HUGGING_FACE_SPLIT = 109
    GIVEN_SPLIT = 110
    PARTITION = 201
    FEATURE_NOISE = 202
    BATCH_ORDER = 301
    BUCKETING = BATCH_ORDER  # seed, stream, vectors; not seed, client, round, epoch, stream
    PARTICIPANTS = 302
    TEST_PARTS = PARTICIPANTS  # seed, stream; not seed, round, stream
    MODEL_DROPOUT = PARTICIPANTS  # hashed, not drawn
    AUGMENTATION = 303
    RING_FIGURE = 401
    BYZANTINE_CLIENTS = 601
    DOCTOR_BATCHES = BYZANTINE_CLIENTS  # added to the seed of a torch generator
    ATTACK_NOISE = 602
    RETRY_CLIENTS = 701
    CLIENT_DROPOUT = 702
    UPDATE_NOISE = 801
    STATISTICS_NOISE = 802


def make_rng(seed: int, stream: Stream) -> np.random.Generator:
    """Return an independent generator for (seed, stream).

    >>> int(make_rng(0, Stream.PARTITION).integers(1000))
    266
    """
    return np.random.default_rng([seed, stream])
