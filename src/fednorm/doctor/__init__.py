"""Examine a model for federated learning: `fednorm doctor`.

>>> examine("mlp", shape=(4,), classes=3).model.classes
3
"""

from fednorm.doctor.examine import examine, read_budget, read_shape
from fednorm.doctor.findings import Budget, DoctorReport, save
from fednorm.doctor.recommend import show

__all__ = ["Budget", "DoctorReport", "examine", "read_budget", "read_shape", "save", "show"]
