"""fednorm in a Flower app of your own: `pip install "fednorm[flower]"`.

At the server, `NormStrategy` stands in the place of FedAvg; at the client, `unpack` and `pack`
stand around your own training loop. `examples/flower_quickstart` is a complete app.
"""

try:
    from fednorm.engines.flower.client import (
        calibrate,
        pack,
        parameter_groups,
        unpack,
        weights_only,
    )
    from fednorm.engines.flower.server import NormStrategy
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "flwr":
        raise
    raise ImportError(
        'fednorm.flower needs Flower, which is not installed; pip install "fednorm[flower]".'
    ) from error

__all__ = ["NormStrategy", "calibrate", "pack", "parameter_groups", "unpack", "weights_only"]
