"""fednorm in your own Flower app: `pip install "fednorm[flower]"`.

At the server, use `NormStrategy` instead of FedAvg; at the client, call `unpack` before and `pack`
after your training loop. `examples/flower_quickstart` is a complete app.

>>> NormStrategy.__name__
'NormStrategy'
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
