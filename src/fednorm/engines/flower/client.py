"""The client's half of a Flower app of your own: two calls around your training loop.

The message names the strategy of the server, so the client needs no setting. Layers record their
statistics while your loop runs. If a strategy needs other steps than the optimizer's, `unpack` and
`parameter_groups` take care of it.

The global model as one record of arrays, folded to torch's own layers and keys.

It is what an evaluation gets, at the server and on the nodes, and what a run ends with. A plain
model loads it strictly and computes what was tested, or refuses it:

- tensors that stay on the nodes are not in it: without them there is no model to test;
- layers that compute something else have other keys.

`unpack` and `read_global_model` accept all of them.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor, nn

from fednorm.algorithms import create_algorithm
from fednorm.algorithms.base import parameter_groups as groups_of
from fednorm.core.algorithm import LocalResult
from fednorm.core.layer import RoundContext
from fednorm.core.layout import find_layout, find_roles
from fednorm.core.messages import Batches, Broadcast, ClientState, LayerStats
from fednorm.core.round import client_calibration, make_reply, start_round
from fednorm.core.strategy import Strategy
from fednorm.core.task import Task, load_state, snapshot
from fednorm.core.types import Clip, Role, Tensors
from fednorm.engines.flower import wire
from fednorm.engines.flower.wire import expect, to_array_record, to_tensors
from fednorm.errors import ConfigError
from fednorm.names import trust_only
from fednorm.nn.folding import fold
from fednorm.nn.weight_std import StandardizedConv
from fednorm.strategies import STRATEGIES, create_strategy

# Attributes of a converted model: what it was made for, and what its layers follow and have seen.
_TASK, _SESSION, _MEASURED = "fednorm_task", "fednorm_session", "fednorm_measured"
_OURS = (wire.HEADER, wire.BUFFERS, wire.STATISTICS, wire.MOMENTUM, wire.STRATEGY_STATE)


def _stay_frozen(module: nn.Module, _given: object) -> None:
    """Keep a module frozen in a user's loop, which may call `.train()` on the model."""
    module.training = False


def describe_strategy(chosen: Strategy) -> str:
    """Return a strategy as text that the client can read."""
    name = STRATEGIES.name_of(type(chosen))
    if name is None:
        raise ConfigError(
            f"clients make the strategy by its name, but {type(chosen).__name__} has none; "
            "write its class in a file that all machines can import."
        )
    return json.dumps({"name": name, **dataclasses.asdict(chosen)})  # type: ignore[call-overload]  # a dataclass


def unpack(
    message: Message,
    model: nn.Module,
    context: Context,
    *,
    data: Iterable[tuple[Tensor, Tensor]] | None = None,
) -> nn.Module:
    """Return your model as the server wants it trained: converted, with the received weights.

    Your own object is not changed. Train what is returned with your own loop, then call `pack`. In
    an evaluate function it is the model to be tested, in evaluation mode, with the layers that this
    node keeps. Modules in evaluation mode, in a model in training mode, are frozen and stay so
    whatever your loop calls. What the strategy keeps on the client comes from `context.state`;
    before its first round it is as in the model that you pass. A strategy that measures statistics
    before it trains (hbn) needs `data`: all of the client's data once, in batches; labels are
    ignored.

    A strategy that clips gradients (`fedwon` with `clip`) does so in hooks on the parameters of
    what is returned: in every backward pass, before gradients are accumulated or unscaled. A copy
    of the model does not clip.

    >>> @app.train()  # doctest: +SKIP
    ... def train(message, context):
    ...     model = unpack(message, Net(), context)
    ...     train_locally(model, loader)
    ...     return pack(model, message, context, examples=len(loader.dataset))
    """
    client_state, session = wire.load_client_state(context.state), RoundContext()
    if message.metadata.message_type.startswith(MessageType.EVALUATE):
        return _read_tested(message, model, client_state)
    task, received = _build_task(message, model)
    if task.strategy.measures and message.metadata.message_type.startswith(MessageType.TRAIN):
        setattr(task.model, _MEASURED, _measure(task, received, client_state, data))
    load_state(task, received.state, client_state)
    setattr(task.model, _SESSION, session)
    start_round(task, received, session)
    if not task.strategy.trains_affine(received):
        for parameter in task.layout.affine:
            parameter.requires_grad = False
    return task.model


def _read_tested(message: Message, model: nn.Module, client_state: ClientState) -> nn.Module:
    if hasattr(model, _TASK):
        raise TypeError("unpack needs your own model for an evaluation, not one that it returned.")
    said = wire.header(message.content)
    arrays = wire.read_arrays(message.content, str(said["weights"]))
    return read_global_model(arrays, model, _read_strategy(said), client_state.tensors)


def _measure(
    task: Task,
    received: Broadcast,
    client_state: ClientState,
    data: Iterable[tuple[Tensor, Tensor]] | None,
) -> Mapping[str, LayerStats]:
    if data is None:
        raise ConfigError(
            f"{type(task.strategy).__name__} measures a client's data before it trains; pass them "
            "to unpack: data=loader, all of them once."
        )
    own = Batches(0, data, examples=0)
    return client_calibration(task, received, client_state, own, task.strategy.measure_rule()).stats


class _StepCounter:
    """Counts calls of the whole model; the step of a call of one part is unknown."""

    def __init__(self) -> None:
        self.taken = -1

    def begin(self, model: nn.Module, _given: object) -> None:
        """Tell the layers that a new step has begun."""
        session = getattr(model, _SESSION, None)
        if isinstance(session, RoundContext) and model.training:
            self.taken += 1
            session.step = self.taken

    def end(self, model: nn.Module, *_given: object) -> None:
        """Tell the layers that it is over."""
        session = getattr(model, _SESSION, None)
        if isinstance(session, RoundContext):
            session.step = -1


def parameter_groups(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Return the groups for an optimizer, with the learning rates of the strategy.

    `fixup` wants a tenth of `lr` for its scalars; with others, all parameters have `lr`.

    Args:
        model: what `unpack` returned.
        lr: the learning rate.

    >>> torch.optim.SGD(parameter_groups(model, lr=0.1), momentum=0.9)  # doctest: +SKIP
    """
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return groups_of(learning, lr, _find_task(model, "parameter_groups").rates)


def pack(
    model: nn.Module,
    message: Message,
    context: Context,
    *,
    examples: int,
    metrics: Mapping[str, float] | None = None,
) -> Message:
    """Return the reply of a client that has trained.

    Args:
        model: what `unpack` returned, trained.
        message: the message that is answered.
        context: of the node; what stays with the client is kept in its `state`.
        examples: the client's weight in averages; usually how many samples it holds.
        metrics: whatever you measured; averaged at the server as FedAvg does.

    >>> pack(model, message, context, examples=320, metrics={"loss": 0.2})  # doctest: +SKIP
    """
    task = _find_task(model, "pack")
    # Moved to another device, a model has other buffers than it was built with.
    task = replace(task, layout=find_layout(task.model, task.strategy.role))
    said = wire.header(message.content)
    trained = make_reply(task, 0, LocalResult(snapshot(task.layout.shared), examples, loss=0.0))
    if task.strategy.measures:
        trained = replace(trained, stats=getattr(task.model, _MEASURED))
    wire.save_client_state(context.state, ClientState(snapshot(task.layout.personal)))
    content = RecordDict({str(said["weights"]): wire.to_array_record(trained.update)})
    if trained.buffers:
        content[wire.BUFFERS] = wire.to_array_record(trained.buffers)
    layers = wire.write_stats(content, trained.stats)
    return _answer(message, content, context, layers, {**(metrics or {}), wire.EXAMPLES: examples})


def _find_task(model: nn.Module, asking: str) -> Task:
    task = getattr(model, _TASK, None)
    if not isinstance(task, Task):
        raise TypeError(f"{asking} needs the model that unpack returned; train that one.")
    return task


def calibrate(
    message: Message,
    model: nn.Module,
    context: Context,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    examples: int,
) -> Message:
    """Answer a query of strategies that measure statistics for tests (hbn, heterofl, alignbn).

    `batches` is all of the client's data once; labels are ignored.

    >>> @app.query("fednorm")  # doctest: +SKIP
    ... def query(message, context):
    ...     return calibrate(message, Net(), context, loader, examples=len(loader.dataset))
    """
    task, received = _build_task(message, model)
    client_state, own = wire.load_client_state(context.state), Batches(0, batches, examples)
    seen = client_calibration(task, received, client_state, own, task.strategy.calibration_rule())
    content = RecordDict()
    layers = wire.write_stats(content, seen.stats)
    return _answer(message, content, context, layers, {wire.EXAMPLES: examples})


def weights_only(mod: Mod) -> Mod:
    """Let a mod of Flower's, such as `fixedclipping_mod`, see the weights and nothing else.

    Statistics and counters are taken out of the message before the mod and put back after it.
    Messages that do not train pass by the mod.

    >>> ClientApp(mods=[weights_only(fixedclipping_mod)])  # doctest: +SKIP
    """

    def wrapped(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if not message.metadata.message_type.startswith(MessageType.TRAIN):
            return call_next(message, context)
        ours = _take_ours(message.content)
        theirs: RecordDict = RecordDict()

        def inner(bare: Message, context: Context) -> Message:
            bare.content = RecordDict({**bare.content, **ours})
            answer = call_next(bare, context)
            if answer.has_content():
                theirs.update(_take_ours(answer.content))
            return answer

        answer = mod(message, context, inner)
        if answer.has_content():
            answer.content = RecordDict({**answer.content, **theirs})
        return answer

    return wrapped


def _take_ours(content: RecordDict) -> RecordDict:
    """Take our records out of a message's content, the weights excepted."""
    return RecordDict({key: content.pop(key) for key in _OURS if key in content})


def _answer(
    message: Message,
    content: RecordDict,
    context: Context,
    layers: list[str],
    metrics: Mapping[str, float],
) -> Message:
    # Sums are taken in the order of this number, so that a run can be repeated to the bit.
    number = int(context.node_config.get("partition-id", context.node_id))
    head = ConfigRecord({"version": wire.VERSION, "client": number})
    if layers:
        head["layers"] = layers
    content[wire.METRICS] = MetricRecord(dict(metrics))
    content[wire.HEADER] = head
    return Message(content, reply_to=message)


def _build_task(message: Message, model: nn.Module) -> tuple[Task, Broadcast]:
    said = wire.header(message.content)
    chosen = _read_strategy(said)
    received = wire.read_broadcast(message.content, str(said["weights"]))
    task = getattr(model, _TASK, None)
    if not isinstance(task, Task) or task.strategy != chosen:
        task = Task.build(model, chosen, create_algorithm("fedavg"), rounds=received.rounds)
        setattr(task.model, _TASK, task)
        steps = _StepCounter()
        task.model.register_forward_pre_hook(steps.begin)
        task.model.register_forward_hook(steps.end)
        for path in task.frozen:
            task.model.get_submodule(path).register_forward_pre_hook(_stay_frozen)
        _clip_in_hooks(task)
    return task, wire.align(received, task.initial_state)


def _read_strategy(said: wire.Header) -> Strategy:
    fields = json.loads(str(said["strategy"]))
    with trust_only():  # to import what a message names would run its code
        return create_strategy(fields.pop("name"), **fields)


def _clip_in_hooks(task: Task) -> None:
    """Clip the gradients of a user's loop."""
    for name, clip in task.clips.items():
        weight = task.model.get_parameter(name)
        if weight.requires_grad:
            weight.register_hook(partial(_clip_gradient, clip, weight))  # type: ignore[no-untyped-call]


def _clip_gradient(clip: Clip, weight: nn.Parameter, gradient: Tensor) -> Tensor:
    return clip(gradient, weight.detach())


def find_personal(task: Task) -> set[str]:
    """Return the keys of the tensors that stay on the nodes."""
    return {key for key, role in task.layout.roles.items() if role is Role.PERSONAL}


def write_global_model(task: Task, folded: nn.Module) -> ArrayRecord:
    """Return a folded model as arrays."""
    personal = find_personal(task)
    state = {key: value for key, value in folded.state_dict().items() if key not in personal}
    return to_array_record(state)


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
    found = {**to_tensors(arrays), **personal}
    tested.load_state_dict(expect("the received model", found, own))
    return tested


def read_initial_arrays(arrays: ArrayRecord, task: Task, plain: nn.Module) -> dict[str, Tensor]:
    """Return the arrays that a run starts from; tensors that stay on the nodes are as in `plain`.

    They may be those of the plain model, or of another run of the same strategy.
    """
    personal = find_personal(task)
    own = {key: value for key, value in plain.state_dict().items() if key in personal}
    return {**own, **to_tensors(arrays)}


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
    marks = {key: value for key, value in own.items() if not value.numel()}
    model.load_state_dict(expect("initial_arrays", {**marks, **ones, **found}, own))
    for key in ones:
        layer = folded[key]
        # What a kernel is scaled by is the gain; standardising it again takes that away.
        once, twice = layer.weight.flatten(1), layer.standardize_weight().flatten(1)
        model.get_parameter(key).copy_((once * twice).sum(1) / twice.square().sum(1))
