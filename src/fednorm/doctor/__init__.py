"""Examine a model for federated learning: `fednorm doctor`."""

from fednorm.doctor.examine import examine, read_shape
from fednorm.doctor.findings import DoctorReport, save
from fednorm.doctor.render import show

__all__ = ["DoctorReport", "examine", "read_shape", "save", "show"]
