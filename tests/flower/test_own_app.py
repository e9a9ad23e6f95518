"""A Flower app of one's own: what goes wrong with BatchNorm in plain Flower, and does not here."""

import io

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
)
from torch import nn

import fednorm.flower
from fednorm.algorithms import create_algorithm
from fednorm.core.task import export
from fednorm.core.types import Role
from fednorm.engines.evaluation import calibrate_for_test
from fednorm.engines.flower import wire
from fednorm.engines.flower.wire import to_array_record, to_tensors
from fednorm.errors import ConfigError, ConversionError, WireError
from fednorm.nn.folding import fold
from fednorm.strategies import STRATEGIES, create_strategy
from flower.federation import Nodes
from support import ToyClients, last, nested_model, task_of

TOY = ToyClients(sizes=(5, 3, 4), steps=2)
RATE, ROUNDS = 0.05, 3


def own_app(mods=(), frozen=(), rate=None):
    """Make an ordinary app; its model starts from other weights than the server's."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message, context):
        client = context.node_config["partition-id"]
        own, data = TOY.batches(client, _round(message)), TOY.all_batches(client).steps
        passed = with_frozen(nested_model(5), frozen)
        model = fednorm.flower.unpack(message, passed, context, data=data)
        model.train()
        optimizer = torch.optim.SGD(
            fednorm.flower.parameter_groups(model, lr=rate(message) if rate else RATE)
        )
        losses = []
        for x, y in own.steps:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return fednorm.flower.pack(
            model, message, context, examples=own.examples, metrics={"loss": losses[-1]}
        )

    @app.query("fednorm")
    def query(message, context):
        own = TOY.all_batches(context.node_config["partition-id"])
        return fednorm.flower.calibrate(
            message, nested_model(5), context, own.steps, examples=own.examples
        )

    @app.evaluate()
    def evaluate(message, context):
        model = fednorm.flower.unpack(message, nested_model(5), context).eval()
        ((x, y),) = TOY.test(context.node_config["partition-id"])
        with torch.no_grad():
            right = float((model(x).argmax(1) == y).double().mean())
        metrics = MetricRecord({"accuracy": right, "num-examples": len(y)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def with_frozen(model, paths):
    for path in paths:
        model.get_submodule(path).eval()
    return model


def fits_plain(name):
    """Return whether a strategy keeps torch's layers, and all of them at the server."""
    if name in {"fedtan", "fedfn"}:
        return False  # not in a loop of one's own; computes something else
    chosen = create_strategy(name)
    same = fold(chosen.convert(nested_model()).model).state_dict().keys()
    return same == nested_model().state_dict().keys() and Role.PERSONAL not in chosen.roles.values()


def _round(message):
    return message.content["config"]["server-round"]


def started(name, *, grid=None, rounds=ROUNDS, server=None, frozen=(), **settings):
    arguments = {} if server else {"min_available_nodes": 3, "fraction_evaluate": 0.0}
    model = with_frozen(nested_model(), frozen)
    chosen = fednorm.flower.NormStrategy(name, model=model, server=server, **(arguments | settings))
    return chosen, chosen.start(grid or Nodes(own_app(frozen=frozen), 3), num_rounds=rounds)


def simulated(name, rounds=ROUNDS, frozen=(), **fields):
    model = with_frozen(nested_model(), frozen)
    task = task_of(name, create_algorithm("fedavg", lr=RATE), model=model, count=rounds, **fields)
    result = last(task, TOY, rounds)
    return task, calibrate_for_test(task, result.state, result.client_states, TOY), result


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - {"fedtan"}))
def test_a_loop_of_ones_own_gives_what_the_simulator_gives(name):
    chosen, result = started(name)
    _, state, _ = simulated(name)
    assert same(chosen.state.weights, state.weights)
    for path, running in state.running.items():
        ours = chosen.tested.running[path]
        assert torch.equal(ours.mean, running.mean)
        assert torch.equal(ours.var, running.var)
        assert ours.num_batches == running.num_batches
    arrays, personal = result.arrays.to_torch_state_dict(), set(chosen.task.layout.personal)
    model = chosen.model.state_dict()
    assert arrays.keys() >= model.keys() - personal
    assert not arrays.keys() & personal
    assert all(torch.equal(arrays[key], model[key]) for key in arrays.keys() & model.keys())


@pytest.mark.parametrize("name", ["naive", "fbn", "dualbn"])
def test_a_frozen_layer_stays_frozen_though_the_loop_calls_train(name):
    frozen = ("stem.1", "blocks.1.downsample.1")
    chosen, _ = started(name, frozen=frozen)
    _, state, _ = simulated(name, frozen=frozen)
    assert chosen.state.round == ROUNDS
    assert same(chosen.state.weights, state.weights)
    for path, running in state.running.items():
        assert torch.equal(chosen.state.running[path].mean, running.mean)
        assert (running.num_batches == 0) == path.startswith(frozen)


def test_a_loop_of_ones_own_clips_as_the_simulator_does():
    chosen, _ = started(create_strategy("fedwon", clip=0.01))
    _, state, _ = simulated("fedwon", clip=0.01)
    _, unclipped, _ = simulated("fedwon")
    assert same(chosen.state.weights, state.weights)
    assert not same(chosen.state.weights, unclipped.weights)


def test_a_finished_model_is_calibrated_by_one_message():
    trained = nested_model(9)
    found = fednorm.flower.calibrate_model(Nodes(own_app(), 3), trained)
    loaders = [TOY.all_batches(client).steps for client in range(3)]
    expected = fednorm.calibrate(trained, loaders, exact=False).state_dict()
    assert found.state_dict().keys() == trained.state_dict().keys()
    for key, value in found.state_dict().items():
        if not key.endswith("num_batches_tracked"):
            torch.testing.assert_close(value, expected[key], rtol=1e-10, atol=1e-12)
    with pytest.raises(ConfigError, match="no node has answered"):
        fednorm.flower.calibrate_model(Nodes(own_app(), 0), trained)


def test_the_groups_of_an_optimiser_hold_each_parameter_that_learns_once():
    held = []

    def train(message, context):
        model = fednorm.flower.unpack(message, nested_model(), context)
        held.append((model, fednorm.flower.parameter_groups(model, lr=0.5)))
        return fednorm.flower.pack(model, message, context, examples=1)

    app = ClientApp()
    app.train()(train)
    for name in ("fixup", "fixbn"):
        started(name, grid=Nodes(app, 3), rounds=2)
    (scalars, groups), (_, plain), (_, frozen) = (held[i] for i in (0, 6, -1))
    assert sorted(g["lr"] for g in groups) == [0.05, 0.5]
    sizes = {g["lr"]: {p.shape for p in g["params"]} for g in groups}
    assert sizes[0.05] == {(1,)}
    assert (1,) not in sizes[0.5]
    assert sum(len(g["params"]) for g in groups) == len(list(scalars.parameters()))
    assert [g["lr"] for g in plain] == [g["lr"] for g in frozen] == [0.5]
    with pytest.raises(TypeError, match="parameter_groups needs the model that unpack returned"):
        fednorm.flower.parameter_groups(nested_model(), lr=0.1)


def hooked_model():
    model = nested_model()
    model.stem[0].weight.register_hook(lambda gradient: gradient)
    return model


def lazy_model():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (hooked_model, r"parameter 'stem\.0\.weight' of .* has a hook"),
        (lazy_model, r"layer '1' \(LazyBatchNorm2d\) has no shape yet"),
    ],
)
def test_what_a_copy_would_lose_is_refused_on_both_sides(make, message):
    with pytest.raises(ConversionError, match=message):
        fednorm.flower.NormStrategy("fbn", model=make())
    app, refused = ClientApp(), []

    @app.train()
    def train(received, context):
        with pytest.raises(ConversionError, match=message):
            fednorm.flower.unpack(received, make(), context)
        refused.append(context.node_id)

    with pytest.raises(ConfigError, match="no node could train"):  # it replied with nothing
        started("fbn", grid=Nodes(app, 3), rounds=1)
    assert len(refused) == 3


@pytest.mark.parametrize(
    ("name", "told"), [("fbn", "With local steps"), ("naive", "Lower the learning rate")]
)
def test_an_app_that_diverges_is_told_what_to_try(name, told, caplog):
    wild = own_app(rate=lambda _: 1e200)
    with pytest.raises(ConfigError, match="has diverged: choose a smaller learning rate"):
        started(name, grid=Nodes(wild, 3), rounds=1)
    later = own_app(rate=lambda message: 1e200 if _round(message) > 1 else RATE)
    chosen, _ = started(name, grid=Nodes(later, 3), rounds=2)
    assert len(chosen.rejected[2]) == 3
    assert "the model stays as it is." in caplog.text
    assert f"If the training has diverged: {told}" in caplog.text


@pytest.mark.parametrize(
    ("name", "told"), [("fbn", True), ("dualbn", True), ("naive", False), ("gn", False)]
)
def test_local_steps_with_fixed_statistics_are_warned_of_once(name, told, caplog):
    started(name, rounds=2)
    warned = f"a node takes 2 steps a round, and {name} fixes its statistics within a round"
    assert caplog.text.count(warned) == told
    assert ("'alignbn' is for local steps" in caplog.text) == told


def test_counters_arrive_as_integers_and_stay_so():
    grid = Nodes(own_app(), 3)
    _, result = started("fbn", grid=grid)
    counters = [k for k in result.arrays if k.endswith("num_batches_tracked")]
    assert len(counters) == 6
    for key in counters:
        value = result.arrays[key].numpy()
        assert value.dtype == np.int64
        assert int(value) == 2 * ROUNDS
    for message in grid.sent:
        assert message.content[wire.STATISTICS]["batches"].dtype == "int64"


def test_plain_flower_averages_counters_as_floats():
    Nodes(own_app(), 1)  # messages are made within a run
    record = ArrayRecord(nn.BatchNorm1d(2).state_dict())
    metrics = MetricRecord({"num-examples": 1})
    reply = RecordDict({"arrays": record, "metrics": metrics})
    message = Message(reply, 1, "train")
    arrays, _ = FedAvg().aggregate_train(1, [message, message])
    assert arrays["num_batches_tracked"].numpy().dtype == np.float64


def test_variances_are_pooled_and_not_averaged():
    chosen, _ = started("fbn", rounds=1)
    flaw, _ = started(create_strategy("fbn", statistics="average"), rounds=1)
    path = next(iter(chosen.state.running))
    pooled, averaged = chosen.state.running[path].var, flaw.state.running[path].var
    assert (pooled > averaged).all()


def test_layers_are_found_by_their_type():
    chosen, _ = started("fbn", rounds=1)
    assert any("bn" not in path and "norm" not in path for path in chosen.state.running)
    norms = [m for m in nested_model().modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(chosen.state.running) == len(norms)


@pytest.mark.parametrize("name", ["fedbn", "silobn", "hbn"])
def test_personal_tensors_survive_between_messages_and_never_leave(name):
    grid = Nodes(own_app(), 3)
    started(name, grid=grid)
    task, _, result = simulated(name)
    for context in grid.contexts.values():
        client_state = wire.load_client_state(context.state)
        assert same(
            client_state.tensors, result.client_states[context.node_config["partition-id"]].tensors
        )
    personal = set(task.layout.personal)
    assert personal
    for message in grid.sent:
        sent = {key for record in message.content.array_records.values() for key in record}
        assert not personal & sent


def test_a_personal_model_is_evaluated_on_its_node():
    grid = Nodes(own_app(), 3)
    _, result = started("fedbn", grid=grid, fraction_evaluate=1.0)
    assert sorted(result.evaluate_metrics_clientapp) == [1, 2, 3]


PLAIN = ["naive", "fixbn", "fbn", "dualbn", "alignbn", "hbn", "heterofl", "feddna", "brn"]


def test_the_list_of_strategies_that_keep_torchs_layers_is_whole():
    assert [name for name in STRATEGIES if fits_plain(name)] == PLAIN


@pytest.mark.parametrize("name", PLAIN)
def test_the_result_loads_strictly_into_the_plain_model_and_computes_the_same(name):
    seen = []

    def test(number, arrays):
        model = nested_model(4)
        model.load_state_dict(arrays.to_torch_state_dict(), strict=True)
        ((x, _),) = TOY.test(number % 3)
        with torch.no_grad():
            expected = export(chosen.task, chosen.tested)(x)
            torch.testing.assert_close(model.eval()(x), expected, rtol=0, atol=1e-6)
            assert torch.equal(chosen.model(x), model(x))
        seen.append(number)

    chosen = fednorm.flower.NormStrategy(name, model=nested_model(), fraction_evaluate=0.0)
    initial = ArrayRecord(nested_model().state_dict())
    chosen.start(Nodes(own_app(), 3), initial, num_rounds=2, evaluate_fn=test)
    assert seen == [0, 1, 2]


def test_a_run_starts_from_the_arrays_it_is_given():
    again = fednorm.flower.NormStrategy("gn", model=nested_model(9), fraction_evaluate=0.0)
    with pytest.raises(WireError, match="which the model does not have"):
        again.start(Nodes(own_app(), 3), ArrayRecord({"a": Array(np.zeros(1))}), num_rounds=0)


@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - {"fedtan"}))
def test_a_run_starts_from_the_result_of_another(name):
    first, result = started(name, rounds=1)
    again = fednorm.flower.NormStrategy(name, model=nested_model(9), fraction_evaluate=0.0)
    again.start(Nodes(own_app(), 3), result.arrays, num_rounds=0)
    arrays = again._arrays().to_torch_state_dict()
    assert arrays.keys() == result.arrays.keys()
    for key, expected in result.arrays.to_torch_state_dict().items():
        # Standardising a kernel again changes it by eps.
        torch.testing.assert_close(arrays[key], expected, rtol=1e-3, atol=1e-4)
    again.start(Nodes(own_app(), 3), result.arrays, num_rounds=1)
    assert again.state.round == 1
    assert first.state.round == 1


class Watched(FedAdam):
    """FedAdam that remembers what it was shown."""

    def configure_train(self, server_round, arrays, config, grid):
        self.shown = set(arrays)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        self.replies = [set(record) for r in replies for record in r.content.array_records.values()]
        return super().aggregate_train(server_round, replies)


def test_server_optimisers_see_weights_only():
    server = Watched(eta=0.1, fraction_evaluate=0.0, min_available_nodes=3)
    chosen, result = started("fbn", server=server)
    weights = set(chosen.task.layout.shared)
    assert server.shown == weights
    assert server.replies == [weights] * 3
    state = result.arrays.to_torch_state_dict()
    variances = [v for k, v in state.items() if k.endswith("running_var")]
    assert variances
    assert all((v > 0).all() for v in variances)
    assert not same(chosen.state.weights, simulated("fbn")[1].weights)


def test_clipping_at_the_server_sees_weights_only():
    inner = FedAvg(fraction_evaluate=0.0, min_available_nodes=3)
    private = DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 1e-3, 3)
    chosen, _ = started("fbn", server=private, rounds=1)
    before, after = chosen.task.initial_state.weights, chosen.state.weights
    moved = torch.cat([(after[k] - before[k]).flatten() for k in before]).norm()
    assert float(moved) <= 1e-3
    running = next(iter(chosen.state.running.values()))
    assert running.num_batches == 2  # statistics are not clipped: they followed
    assert float((running.mean).abs().max()) > 1e-2


def test_clipping_at_the_client_sees_weights_only():
    inner = FedAvg(fraction_evaluate=0.0, min_available_nodes=3)
    private = DifferentialPrivacyClientSideFixedClipping(inner, 0.0, 1e-3, 3)
    grid = Nodes(own_app([fednorm.flower.weights_only(fixedclipping_mod)]), 3)
    chosen, _ = started("fbn", server=private, rounds=1, grid=grid)
    before, after = chosen.task.initial_state.weights, chosen.state.weights
    moved = torch.cat([(after[k] - before[k]).flatten() for k in before]).norm()
    assert 0 < float(moved) <= 1e-3 * (1 + 1e-9)
    assert next(iter(chosen.state.running.values())).num_batches == 2


def test_a_node_that_fails_reduces_the_round(caplog):
    grid = Nodes(own_app(), 3)
    grid.contexts[999].node_config["partition-id"] = 77  # it has no such data
    grid.lost = {998}
    chosen, result = started("fbn", grid=grid)
    assert chosen.state.round == ROUNDS
    assert result.arrays is not None
    assert "continues without node 999" in caplog.text


def test_a_round_without_any_answer_leaves_the_model_as_it_is():
    grid = Nodes(own_app(), 3)
    grid.lost = set(grid.contexts)
    chosen, result = started("fbn", grid=grid, rounds=1)
    assert len(result.arrays) == 0
    assert same(chosen.state.weights, chosen.task.initial_state.weights)


def test_a_reply_that_is_not_understood_is_left_out(caplog):
    app = own_app()

    @app.train("other")
    def other(message, context):
        raise NotImplementedError

    honest = app._registered_funcs["train.default"]

    def forged(message, context):
        reply = honest(message, context)
        if context.node_config["partition-id"] == 1:
            record = reply.content["arrays"]
            key = next(iter(record))
            record[key] = Array("object", record[key].shape, "pickle", b"cos\nsystem\n(S'id'\ntR.")
        if context.node_config["partition-id"] == 2:
            reply.content["arrays"]["extra"] = Array(np.zeros(1))
        return reply

    app._registered_funcs["train.default"] = forged
    started("fbn", grid=Nodes(app, 3), rounds=1)
    assert "must be of type 'numpy.ndarray', but is 'pickle'" in caplog.text
    assert "has 'extra', which the model does not have" in caplog.text


def test_objects_that_numpy_would_unpickle_are_refused():
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    forged = ArrayRecord({"w": Array("object", (1,), "numpy.ndarray", buffer.getvalue())})
    with pytest.raises(WireError, match="'w' cannot be read as numbers"):
        to_tensors(forged)


def test_misuse_is_told():
    grid = Nodes(own_app(), 1)
    plain = Message(RecordDict({"config": ConfigRecord({"a": 1})}), 1000, "train")
    context = grid.contexts[1000]
    with pytest.raises(WireError, match=r"use fednorm\.flower\.NormStrategy"):
        fednorm.flower.unpack(plain, nested_model(), context)
    with pytest.raises(TypeError, match="the model that unpack returned"):
        fednorm.flower.pack(nested_model(), plain, context, examples=1)
    with pytest.raises(ConfigError, match="in the middle of a step"):
        fednorm.flower.NormStrategy("fedtan", model=nested_model())
    with pytest.raises(ConfigError, match="passed as server"):
        fednorm.flower.NormStrategy(
            "fbn", model=nested_model(), server=FedAvg(), fraction_train=0.5
        )
    with pytest.raises(WireError, match="keep the model in float32"):
        to_array_record({"w": torch.zeros(1, dtype=torch.bfloat16)})


class Parts(nn.Module):
    """A model whose parts the user's loop calls one after the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.BatchNorm2d(3))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(108, 4))
        self.body[2].eval()
        self.double()

    def forward(self, x):
        return self.head(self.body(x))


def test_a_loop_may_call_parts_of_the_model():
    """What is frozen stays so, and what the layers keep does not grow with the steps."""
    app, kept = ClientApp(), []

    @app.train()
    def train(message, context):
        model = fednorm.flower.unpack(message, Parts(), context)
        model.train()
        x, y = torch.randn(4, 1, 8, 8).double(), torch.randint(4, (4,))
        model(x)  # a step of which the layers know
        for _ in range(10):
            nn.functional.cross_entropy(model.head(model.body(x)), y).backward()
        kept.append(len(model.body[1].recorder.logs))
        return fednorm.flower.pack(model, message, context, examples=4)

    chosen = fednorm.flower.NormStrategy(
        "fbn", model=Parts(), min_available_nodes=3, fraction_evaluate=0.0
    )
    chosen.start(Nodes(app, 3), num_rounds=2)
    assert chosen.state.round == 2
    assert kept == [1] * 6
    assert chosen.state.running["body.1"].num_batches == 22
    assert chosen.state.running["body.2"].num_batches == 0


@pytest.mark.parametrize(
    ("column", "wrong"),
    [
        ("batches", torch.full((6,), float("nan"), dtype=torch.float64)),
        ("samples", torch.ones(6, dtype=torch.complex128)),
        ("count", torch.ones(6, dtype=torch.int64)),
    ],
)
def test_numbers_of_another_kind_are_a_bad_reply(column, wrong, caplog):
    def spoil(message, context, call_next):
        answer = call_next(message, context)
        if context.node_config["partition-id"] == 1:
            record = to_tensors(answer.content[wire.STATISTICS])
            answer.content[wire.STATISTICS] = to_array_record({**record, column: wrong})
        return answer

    chosen, _ = started("fbn", grid=Nodes(own_app(mods=[spoil]), 3), rounds=1)
    assert chosen.state.round == 1
    assert column in caplog.text
