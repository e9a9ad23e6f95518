"""What will happen to a model in federated learning, in numbers: `fednorm doctor`."""

from fednorm.doctor.examination import examine
from fednorm.doctor.report import Report
from fednorm.doctor.save import save
from fednorm.doctor.subject import read_shape
from fednorm.doctor.tables import show

__all__ = ["Report", "examine", "read_shape", "save", "show"]
