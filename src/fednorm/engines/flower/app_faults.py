"""A user's app that cannot work, told once at the server, with the lines to change.

An app that has worked before is not judged: nodes may fail later for reasons that are theirs.
"""

from collections.abc import Sequence

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp.strategy import FedXgbBagging, FedXgbCyclic, Strategy

from fednorm.errors import ConfigError

_UNREACHED = {
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
}
UNPACK = "model = fednorm.flower.unpack(msg, Net(), context)"
_TRAIN = (
    f"a train function begins with `{UNPACK}` instead of load_state_dict, and ends with "
    "`return fednorm.flower.pack(model, msg, context, examples=len(trainloader.dataset))`."
)
_LEGACY = (
    "the ClientApp is a legacy one (client_fn, NumPyClient), which fednorm does not support; write "
    "@app.train() and @app.evaluate() functions, as in README, section Flower."
)
# What an error of a node says, and what to do about it.
_HINTS = {
    "secagg": "SecAgg+ exists in Flower for legacy apps alone, and fednorm does not support it; "
    "remove the mod.",
    "fitins": _LEGACY,
    "evaluateins": _LEGACY,
    "exactly one ArrayRecord": "a mod of Flower's sees the weights alone if it is wrapped: "
    "mods=[fednorm.flower.weights_only(mod)].",
    "state_dict": _TRAIN,
    "record 'fednorm'": _TRAIN,
}
_QUERY = """The ClientApp needs these lines:

@app.query("fednorm")
def query(msg, context):
    batches = [(images, labels) for images, labels in trainloader]  # all of the node's data once
    return fednorm.flower.calibrate(msg, Net(), context, batches, examples=len(trainloader.dataset))
"""


def is_unreached(reply: Message) -> bool:
    """Return whether a node was not reached, so that nothing is known about its app."""
    return reply.has_error() and reply.error.code in _UNREACHED


def list_failures(replies: Sequence[Message]) -> list[str]:
    """Return what nodes report whose app failed; nodes that were not reached report nothing."""
    failed = [m for m in replies if m.has_error() and not is_unreached(m)]
    return [f"node {m.metadata.src_node_id}: {m.error.reason}" for m in failed]


def _shorten(reason: str) -> str:
    """Return what a node reports without the traceback that a simulated one puts before it."""
    node, _, rest = reason.partition(": ")
    return f"{node}: {rest.rpartition('occurred. Message: ')[2]}"


def refuse_training(reasons: Sequence[str]) -> None:
    """Raise because no node of a first round has trained."""
    raise ConfigError(f"no node could train. {_find_hint(reasons[0])}{_quote(reasons[0])}")


def refuse_evaluation(strategy: str, reasons: Sequence[str]) -> None:
    """Raise if nodes tried to load into their plain model what does not fit there."""
    if any("state_dict" in _shorten(reason) for reason in reasons):
        raise ConfigError(
            f"no node could evaluate: the plain model is not what {strategy!r} trains. Write "
            f"`{UNPACK}` in the evaluate function instead of load_state_dict.{_quote(reasons[0])}"
        )


def refuse_calibration(strategy: str, reasons: Sequence[str]) -> None:
    """Raise because no node has measured its data."""
    lines = _QUERY if "No query function" in reasons[0] else ""
    raise ConfigError(
        f"no node measured the statistics of its data, which {strategy!r} needs. {lines}"
        f"{_quote(reasons[0])}"
    )


def explain_central(strategy: str) -> str:
    """Return what to do if evaluate_fn cannot load the arrays."""
    return (
        f"evaluate_fn could not load its arrays: the plain model is not what {strategy!r} trains. "
        "Test `model = strategy.model` there, the NormStrategy's own; it holds the same tensors."
    )


def refuse_server(server: Strategy | None) -> None:
    """Raise if a strategy cannot decide on the weights of a model."""
    inner: object = server
    while inner is not None:
        if not isinstance(inner, Strategy):
            raise ConfigError(
                f"server must be one of flwr.serverapp.strategy, but is {type(inner).__name__} of "
                f"{type(inner).__module__}; legacy strategies are not supported."
            )
        if isinstance(inner, FedXgbBagging | FedXgbCyclic):
            raise ConfigError(
                f"{type(inner).__name__} combines trees, which have no normalization layers; use "
                "it by itself."
            )
        inner = getattr(inner, "strategy", None)  # of a wrapper


def _find_hint(reason: str) -> str:
    said = _shorten(reason)
    return next((hint for words, hint in _HINTS.items() if words in said), "")


def _quote(reason: str) -> str:
    return f"\nThe first report, of {_shorten(reason)[:300]}"
