"""Trained models: what was tested, folded to torch's layers, in memory or in a file, and back.

A file is in the safetensors format: tensors by their `state_dict` keys, and in its header, as JSON,
which strategy trained which network. Where clients keep personal layers, the file has what is
shared, and the folder `clients` next to it one file for each client with the rest.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import safetensors
import safetensors.torch
import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor, nn

from fednorm.core.messages import ClientState, ServerState
from fednorm.core.task import export
from fednorm.core.types import ClientId, Tensors
from fednorm.errors import ConfigError
from fednorm.experiment.build import PreparedRun
from fednorm.experiment.objective import ModelSource, name_function
from fednorm.experiment.schema.specs import create_entry
from fednorm.models import MODELS, create_model
from fednorm.names import trust_only
from fednorm.nn.copies import copy_model
from fednorm.nn.folding import fold
from fednorm.objects import OBJECT
from fednorm.strategies import STRATEGIES
from fednorm.system import atomic_write

MODEL_FILE = "model.safetensors"
CLIENT_FILES = "clients/*.safetensors"  # next to it
_KEY = "fednorm"  # in the header of a file; one key, since the format does not order several
_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_LISTED = 4  # tensors that a message names


@dataclass(frozen=True)
class ModelHeader:
    """What a network needs to be built again."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    strategy: str
    fields: dict[str, Any]  # of the strategy
    model: str | None  # its name; None if it was given as an object
    settings: dict[str, Any]  # of the model
    network: str  # its class
    shape: tuple[int, ...]  # of a sample
    classes: int
    dtype: str
    personal: tuple[str, ...] = ()  # keys that each client has for itself
    version: str = field(default_factory=lambda: version("fednorm"))


@dataclass(frozen=True)
class TrainedModel:
    """A trained model in memory."""

    network: nn.Module  # folded
    header: ModelHeader
    clients: Mapping[ClientId, Tensors] = field(default_factory=dict)  # personal tensors

    def build(self, client: ClientId | None = None) -> nn.Module:
        """Return a copy of the network, or of one client's."""
        _check_client(self.header, client, self.clients)
        network = copy_model(self.network)
        if client is not None:
            network.load_state_dict(self.clients[client], strict=False)
        return network


def fold_run(prepared: PreparedRun, state: ServerState) -> TrainedModel:
    """Return the trained model of a run, without its clients' personal tensors."""
    network = fold(export(prepared.task, state))
    personal = tuple(key for key in network.state_dict() if key in prepared.task.layout.personal)
    return TrainedModel(network, _describe(prepared, network, personal))


def fold_clients(
    prepared: PreparedRun,
    state: ServerState,
    states: Iterable[tuple[ClientId, ClientState]],
    personal: Sequence[str],
) -> Iterator[tuple[ClientId, Tensors]]:
    """Yield the personal tensors of each client: all of them may not fit into memory."""
    for client, client_state in states if personal else ():
        found = fold(export(prepared.task, state, client_state)).state_dict()
        yield client, {key: found[key].clone() for key in personal}


def _describe(prepared: PreparedRun, network: nn.Module, personal: tuple[str, ...]) -> ModelHeader:
    experiment, task = prepared.experiment, prepared.task
    own = experiment.model.name.startswith(OBJECT)
    named = prepared.setup.ours or (":" in experiment.model.name and not own)
    return ModelHeader(
        strategy=prepared.entry.strategy,
        fields=asdict(task.strategy),  # type: ignore[call-overload]  # a dataclass
        model=experiment.model.name if named else None,
        settings=experiment.model.fields if named else {},
        network=type(network).__name__,
        shape=tuple(prepared.data.shape),
        classes=prepared.data.classes,
        dtype=experiment.dtype,
        personal=personal,
    )


def save_model(
    path: Path, trained: TrainedModel, clients: Iterable[tuple[ClientId, Tensors]] = ()
) -> None:
    """Write a trained model, and next to it the clients' personal tensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    personal = set(trained.header.personal)
    tensors = {k: v for k, v in trained.network.state_dict().items() if k not in personal}
    _write(path, tensors, {_KEY: json.dumps(asdict(trained.header))})
    for client, own in clients:
        _find_client_file(path, client).parent.mkdir(exist_ok=True)
        _write(_find_client_file(path, client), own)


def _write(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> None:
    # Tied layers have one tensor under several keys; each key gets its own copy.
    plain = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    with atomic_write(path) as file:
        file.write(safetensors.torch.save(plain, metadata))


def _find_client_file(path: Path, client: ClientId) -> Path:
    return path.parent / CLIENT_FILES.replace("*", str(client))


def load_model(
    source: str | Path, model: ModelSource | None = None, *, client: ClientId | None = None
) -> nn.Module:
    """Return the trained model of a run's folder or file; see `fednorm.load`."""
    path = _find_file(Path(source))
    header, tensors = _read_header(path), _read(path)[1]
    own = (file.stem for file in path.parent.glob(CLIENT_FILES) if file.is_file())
    _check_client(header, client, sorted(int(stem) for stem in own if stem.isdecimal()))
    if client is not None:
        tensors |= _read(_find_client_file(path, client))[1]
    plain = _build_plain(path, header, model)
    try:
        plain = plain.to(_DTYPES[header.dtype])
        with trust_only():  # to import what a file names would run its code
            strategy = create_entry(STRATEGIES, header.strategy, header.fields)
    except (LookupError, ValueError, TypeError) as error:
        raise _refuse_header(path, error) from error
    try:
        network = fold(strategy.convert(plain).model)
    except (ValueError, TypeError) as error:
        raise _refuse_model(path, header, plain, str(error)) from error
    if problems := list(_compare_tensors(tensors, network.state_dict())):
        raise _refuse_model(path, header, plain, "; ".join(problems))
    network.load_state_dict(tensors)
    return network


def _find_file(source: Path) -> Path:
    if source.is_file():
        return source
    if not source.is_dir():
        raise ConfigError(f"there is no folder or file {str(source)!r}.")
    found = [source / MODEL_FILE, *sorted(source.glob(f"runs/*/{MODEL_FILE}"))]
    found = [path for path in found if path.is_file()]
    if not found:
        raise ConfigError(
            f"{str(source)!r} holds no {MODEL_FILE}: a run writes it at its end; pass the folder "
            "of a finished run, such as 'results/compare/runs/fbn-seed0'."
        )
    if len(found) > 1:
        runs = ", ".join(repr(str(path.parent)) for path in found)
        raise ConfigError(f"{str(source)!r} holds {len(found)} runs; choose one of {runs}.")
    return found[0]


def _read_header(path: Path) -> ModelHeader:
    text = _read(path)[0].get(_KEY)
    if text is None:
        raise ConfigError(
            f"{str(path)!r} does not say how its model was made: it was written by an older "
            "fednorm, where --fresh makes the run again, or by another program, where "
            "safetensors.torch.load_file reads it."
        )
    try:
        return TypeAdapter(ModelHeader).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"the header of {str(path)!r} was written by another version of fednorm than this one, "
            f"{version('fednorm')} ({f'{where}: ' * bool(where)}{first['msg'].lower()})."
        ) from None


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and tensors of a file."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            return file.metadata() or {}, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    except safetensors.SafetensorError as error:
        raise ConfigError(
            f"{str(path)!r} is not an intact safetensors file ({error}); other formats, which may "
            "run code when they are opened, are not read."
        ) from None


def _refuse_model(path: Path, header: ModelHeader, plain: nn.Module, why: str) -> ConfigError:
    return ConfigError(
        f"{type(plain).__name__} is not the model in {str(path)!r}, a {header.network} for samples "
        f"of shape {header.shape} and {header.classes} classes: {why.removesuffix('.')}. Pass the "
        "model that was trained, as it was before training."
    )


def _refuse_header(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"the header of {str(path)!r} describes no model: {error}")


def _build_plain(path: Path, header: ModelHeader, model: ModelSource | None) -> nn.Module:
    """Return the network as it was before its conversion; the user's is copied."""
    if model is not None:
        given = name_function(model)  # as training took it
        if isinstance(given, str):
            return create_model(given, header.shape, header.classes, seed=0)
        return copy_model(given) if isinstance(given, nn.Module) else given()
    # A function that a file names is not called: the file may come from anywhere.
    if header.model is None or not MODELS.has_own(header.model):
        made = f"by {header.model!r}" if header.model else "from an object"
        raise ConfigError(
            f"{str(path)!r} holds a {header.network} that was made {made}, which a file cannot "
            f"hold; pass the model again: fednorm.load(…, {header.network}(…))."
        )
    try:
        return create_model(header.model, header.shape, header.classes, seed=0, **header.settings)
    except (ValueError, TypeError, ArithmeticError, MemoryError, RuntimeError) as error:
        raise _refuse_header(path, error) from error


def _check_client(header: ModelHeader, client: ClientId | None, known: Iterable[ClientId]) -> None:
    """Raise unless a client is given where, and only where, clients have layers for themselves."""
    if not header.personal:
        if client is not None:
            raise ConfigError(
                f"strategy {header.strategy!r} trains one model for all; leave client={client} out."
            )
        return
    there = list(known)
    if client in there:
        return
    kept = f"strategy {header.strategy!r} keeps {_list_names(header.personal)} on its clients"
    if not there:
        raise ConfigError(
            f"{kept}, and they are not next to the file, as after a run on Flower: it holds what "
            "is shared, which safetensors.torch.load_file reads."
        )
    raise ConfigError(
        f"{kept}, so that there is a model for each: choose client= among "
        f"{', '.join(map(str, there))}{'' if client is None else f', not {client}'}."
    )


def _compare_tensors(found: Tensors, needed: Tensors) -> Iterator[str]:
    """Yield what is wrong with tensors that are to be loaded."""
    if missing := [key for key in needed if key not in found]:
        yield f"the file lacks {_list_names(missing)}"
    if left := [key for key in found if key not in needed]:
        yield f"the model lacks {_list_names(left)}"
    for key, tensor in needed.items():
        if key in found and tensor.shape != found[key].shape:
            yield (
                f"{key} has the shape {tuple(found[key].shape)} in the file and "
                f"{tuple(tensor.shape)} in the model"
            )
            return


def _list_names(names: Iterable[str]) -> str:
    known = list(names)
    more = len(known) - _LISTED
    return ", ".join(known[:_LISTED]) + (f" and {more} more" if more > 0 else "")
