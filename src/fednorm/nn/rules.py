"""The rules: how a BatchNorm layer treats a training batch.

Methods that need more have their rule next to their layer: `sync_norm.py` (fedtan), `dual_norm.py`,
`aligned_norm.py`, `hybrid_norm.py` and `switch_norm.py`; that of batch renormalization is in
`strategies/brn.py`.
"""

from torch import Tensor

from fednorm.core.layer import NormRule
from fednorm.nn.batch_norm import FedBatchNorm, batch_stats

__all__ = [
    "batch_stats",
    "batch_stats_recorded",
    "batch_stats_untracked",
    "calibrate_averaged",
    "calibrate_batch",
    "calibrate_shared",
    "frozen_stats",
    "shared_stats",
]


def _record_and_use_batch(layer: FedBatchNorm, x: Tensor) -> Tensor:
    layer.record_batch(x)
    return layer.normalize_by_batch(x)


def _accumulate_and_use_batch(layer: FedBatchNorm, x: Tensor) -> Tensor:
    layer.accumulate(x)
    return layer.normalize_by_batch(x)


def _average_and_use_batch(layer: FedBatchNorm, x: Tensor) -> Tensor:
    layer.average_batch(x)
    return layer.normalize_by_batch(x)


def _accumulate_and_use_running(layer: FedBatchNorm, x: Tensor) -> Tensor:
    layer.accumulate(x)
    return layer.normalize_by_running(x)


def _record_and_use_running(layer: FedBatchNorm, x: Tensor) -> Tensor:
    layer.record_batch(x)
    return layer.normalize_by_running(x)


# `batch_stats`, torch's own BatchNorm, is defined with the layer: it follows it outside of rounds.
batch_stats_recorded = NormRule(
    "batch", tracks=False, reports="moments", normalize=_record_and_use_batch
)
batch_stats_untracked = NormRule(
    "batch", tracks=False, reports="nothing", normalize=FedBatchNorm.normalize_by_batch
)
shared_stats = NormRule(
    "shared", tracks=False, reports="moments", normalize=_record_and_use_running
)
frozen_stats = NormRule(
    "shared", tracks=False, reports="nothing", normalize=FedBatchNorm.normalize_by_running
)
calibrate_batch = NormRule(
    "batch", tracks=False, reports="totals", normalize=_accumulate_and_use_batch
)
calibrate_shared = NormRule(
    "shared", tracks=False, reports="totals", normalize=_accumulate_and_use_running
)
calibrate_averaged = NormRule(
    "batch", tracks=False, reports="averages", normalize=_average_and_use_batch
)
