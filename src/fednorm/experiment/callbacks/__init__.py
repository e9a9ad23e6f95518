"""Callbacks follow the runs of a comparison: one line of the registry for each.

A callback is named in a configuration, or `package.module:Class` is, or an object is given in
Python. Callbacks change no number of a round; those that may end a run belong to its settings.
"""

from typing import Any

from fednorm.errors import ConfigError
from fednorm.names import find_plugin, importable_directory
from fednorm.objects import OBJECT
from fednorm.registry import Registry, parse_call, split_outside

__all__ = ["CALLBACKS", "create_callback", "list_callbacks", "may_end_runs"]

CALLBACKS: Registry[Any] = Registry(
    "callback",
    __name__,
    {
        "early_stopping": "base:EarlyStopping",
        "tensorboard": "loggers:TensorBoard",
        "wandb": "loggers:WeightsAndBiases",
        "mlflow": "loggers:MLflow",
    },
)


def create_callback(name: str, **fields: Any) -> Any:
    """Create the callback `name`; `fields` are its settings.

    Args:
        name: a registered name, that of an installed package's entry point, or
            "package.module:Class"; the current directory is importable.
        fields: what the class is called with.

    >>> create_callback("early_stopping", patience=5)
    EarlyStopping(metric='accuracy', patience=5, min_delta=0.0, mode='auto')
    """
    if CALLBACKS.has_own(name):
        return CALLBACKS.create(name, fields)
    try:
        return find_class(name)(**fields)
    except TypeError as error:
        raise ConfigError(f"callback {name!r} with {fields}: {error}.") from error


def find_class(name: str) -> Any:
    """Return the class of a callback, which is imported."""
    if CALLBACKS.has_own(name):
        return CALLBACKS.find(name)
    if name.startswith(OBJECT):
        raise ConfigError(
            f"the callback {name.removeprefix(OBJECT)!r} was given as an object in Python; give it "
            'to fednorm.compare again, or name it as "package.module:Class".'
        )
    with importable_directory():
        return find_plugin("callback", name, CALLBACKS)


def may_end_runs(name: str) -> bool:
    """Return whether a callback may end runs, so that it belongs to their settings.

    >>> may_end_runs("early_stopping"), may_end_runs("tensorboard")
    (True, False)
    """
    return name.startswith(OBJECT) or not getattr(find_class(name), "observes", False)


def list_callbacks() -> list[str]:
    """Return the names of all callbacks, sorted.

    >>> list_callbacks()
    ['early_stopping', 'mlflow', 'tensorboard', 'wandb']
    """
    return sorted(CALLBACKS.list_names())


def parse_callbacks(value: Any) -> Any:
    """Read callbacks as a list; a text may have fields in brackets.

    >>> parse_callbacks("early_stopping(patience=5, metric=loss), tensorboard")
    [{'name': 'early_stopping', 'patience': 5, 'metric': 'loss'}, {'name': 'tensorboard'}]
    """
    if isinstance(value, str):
        value = [part for part in split_outside(value, ",") if part.strip()]
    if not isinstance(value, list | tuple):
        return value
    return [_parse_text(one) if isinstance(one, str) else one for one in value]


def _parse_text(text: str) -> dict[str, Any]:
    called = parse_call(text, "patience=5")
    if called is None:
        raise ConfigError(
            f"callback {text!r} is not a name with fields; write for example "
            "'early_stopping(patience=5)'."
        )
    return {"name": called[0], **called[1]}
