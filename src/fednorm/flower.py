"""fednorm in your own Flower app: `pip install ".[flower]"` in a checkout.

At the server, use `NormStrategy` instead of FedAvg; at the client, call `unpack` before and `pack`
after your training loop. An evaluate function may load the arrays into the plain model; for
strategies with other layers, or layers that stay on the client, it calls `unpack`, too.
`examples/flower_quickstart` is a complete app.

>>> NormStrategy.__name__
'NormStrategy'
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
    from fednorm.engines.flower.server import NormStrategy, calibrate_model

__all__ = [
    "NormStrategy",
    "calibrate",
    "calibrate_model",
    "pack",
    "parameter_groups",
    "unpack",
    "weights_only",
]
