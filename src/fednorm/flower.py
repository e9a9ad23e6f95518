"""fednorm in a Flower app of your own: `pip install "fednorm[flower]"`.

At the server, `NormStrategy` stands in the place of FedAvg; at the client, `unpack` and `pack`
stand around your own training loop. `examples/flower_quickstart` is a complete app.
"""

from fednorm.engines.flower import require_flower

with require_flower("fednorm.flower"):
    from fednorm.engines.flower.client import (
        calibrate,
        pack,
        parameter_groups,
        unpack,
        weights_only,
    )
    from fednorm.engines.flower.server import NormStrategy

__all__ = ["NormStrategy", "calibrate", "pack", "parameter_groups", "unpack", "weights_only"]
