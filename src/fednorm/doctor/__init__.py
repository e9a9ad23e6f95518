"""What will happen to a model in federated learning, in numbers: `fednorm doctor`."""

from fednorm.doctor.examine import examine
from fednorm.doctor.render import show
from fednorm.doctor.report import Report
from fednorm.doctor.save import save
from fednorm.doctor.subject import read_shape

__all__ = ["Report", "examine", "read_shape", "save", "show"]
