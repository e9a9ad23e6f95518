"""What will happen to a model in federated learning, in numbers: `fednorm doctor`.

>>> examine("mlp", shape=(4,), classes=3).model.classes
3
"""

from fednorm.doctor.examine import examine, read_shape
from fednorm.doctor.findings import Report, save
from fednorm.doctor.render import show

__all__ = ["Report", "examine", "read_shape", "save", "show"]
