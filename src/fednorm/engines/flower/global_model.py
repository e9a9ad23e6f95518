"""The global model as one record of arrays, folded to torch's own layers and keys.

It is what an evaluation gets, at the server and on the nodes, and what a run ends with. A plain
model loads it strictly and computes what was tested, or refuses it:

- tensors that stay on the nodes are not in it: without them there is no model to test;
- layers of another kind have other keys;
- where the keys are the same but a layer computes something else (fedfn), the key `NOT_PLAIN` is
  added, which the plain model does not know.

`unpack` and `read_global_model` accept all of them.
"""

import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from fednorm.core.layout import find_roles
from fednorm.core.strategy import Strategy
from fednorm.core.task import Task
from fednorm.core.types import Role, Tensors
from fednorm.engines.flower.wire import expect, to_array_record, to_tensors
from fednorm.nn.folding import fold
from fednorm.nn.weight_std import StandardizedConv

NOT_PLAIN = "load this with fednorm.flower.unpack"


def find_personal(task: Task) -> set[str]:
    """Return the keys of the tensors that stay on the nodes."""
    return {key for key, role in task.layout.roles.items() if role is Role.PERSONAL}


def write_global_model(task: Task, folded: nn.Module, plain: nn.Module) -> ArrayRecord:
    """Return a folded model as arrays; `plain` is the user's model, before its conversion."""
    personal = find_personal(task)
    state = {key: value for key, value in folded.state_dict().items() if key not in personal}
    if state.keys() == plain.state_dict().keys() and not _computes_like(folded, plain):
        state[NOT_PLAIN] = torch.zeros(())
    return to_array_record(state)


def _computes_like(folded: nn.Module, plain: nn.Module) -> bool:
    """Return whether two models have layers of the same types at the same places."""
    ours, theirs = ({p: type(m) for p, m in model.named_modules()} for model in (folded, plain))
    return ours == theirs


def read_global_model(
    arrays: ArrayRecord, model: nn.Module, strategy: Strategy, kept: Tensors
) -> nn.Module:
    """Return a global model for evaluation, with the tensors that this node has `kept`.

    Those that it has not kept yet, because it has not trained, are as in `model`.
    """
    converted = strategy.convert(model).model
    roles, tested = find_roles(converted, strategy.role), fold(converted)
    own = tested.state_dict()
    personal = {key: kept.get(key, own[key]) for key in own if roles.get(key) is Role.PERSONAL}
    found = {**_read(arrays), **personal}
    tested.load_state_dict(expect("the received model", found, own))
    return tested


def _read(arrays: ArrayRecord) -> dict[str, Tensor]:
    return {key: value for key, value in to_tensors(arrays).items() if key != NOT_PLAIN}


def read_initial_arrays(arrays: ArrayRecord, task: Task, plain: nn.Module) -> dict[str, Tensor]:
    """Return the arrays that a run starts from; tensors that stay on the nodes are as in `plain`.

    They may be those of the plain model, or of another run of the same strategy.
    """
    personal = find_personal(task)
    own = {key: value for key, value in plain.state_dict().items() if key in personal}
    return {**own, **_read(arrays)}


@torch.no_grad()
def load_folded(model: nn.Module, found: Tensors) -> None:
    """Load a folded model's tensors into the converted model, which computes the same then."""
    own = model.state_dict()
    folded = {
        f"{path}.gain": layer
        for path, layer in model.named_modules()
        if isinstance(layer, StandardizedConv) and f"{path}.gain" not in found
    }
    ones = {key: torch.ones_like(own[key]) for key in folded if key in own}
    model.load_state_dict(expect("initial_arrays", {**ones, **found}, own))
    for key in ones:
        layer = folded[key]
        # What a kernel is scaled by is the gain; standardising it again takes that away.
        once, twice = layer.weight.flatten(1), layer.standardize_weight().flatten(1)
        model.get_parameter(key).copy_((once * twice).sum(1) / twice.square().sum(1))
