"""alignbn against plain torch functions: training, shared and own statistics, test, export."""

import copy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

import fednorm
from fednorm import ClientState, broadcast, client_round, server_round
from fednorm.aggregators import create_aggregator
from fednorm.algorithms import create_algorithm
from fednorm.attacks import create_attack
from fednorm.attacks.adversary import Adversary
from fednorm.core.task import export
from fednorm.engines.base import Faults
from fednorm.engines.evaluation import Transport, calibrate_for_test
from fednorm.engines.loop import rounds
from fednorm.engines.stacked import StackedTrainer
from fednorm.experiment.prepare import prepare
from fednorm.experiment.schema.load import build_experiment
from populations import Population
from strategies.aligned import (
    LR,
    MODELS,
    TIGHT,
    average,
    away,
    conv_net,
    half_frozen,
    make_oracle,
    scale_and_shift,
    spread,
)
from support import ToyClients, in_processes, task_of


def make_task(model, algorithm=None, *, count=5):
    return task_of(
        "alignbn", algorithm or create_algorithm("fedavg", lr=LR), model=model, count=count
    )


def assert_same(result, oracle):
    state = result.state
    for name, value in oracle.weights.items():
        torch.testing.assert_close(state.weights[name], value, rtol=0, atol=TIGHT)
    for path, (mean, var) in oracle.shared.items():
        got = state.running[path]
        torch.testing.assert_close(got.mean, mean, rtol=TIGHT, atol=TIGHT)
        torch.testing.assert_close(got.var, var, rtol=TIGHT, atol=TIGHT)
        assert got.num_batches == oracle.counter[path]
    assert_same_own(result.client_states, oracle)


OWN = ("mean", "var", "measured_mean", "measured_var")


def assert_same_own(client_states, oracle):
    """Compare what clients keep: own statistics, what they measured, the counter they received."""
    assert set(client_states) == set(oracle.kept)
    for client, layers in oracle.kept.items():
        kept = client_states[client].tensors
        for path, (own, calls, counter) in layers.items():
            wanted = (*own, *average(calls, oracle.layers[path].momentum))
            for part, value in zip(OWN, wanted, strict=True):
                got = kept[f"{path}.placement.{part}"]
                torch.testing.assert_close(got, value, rtol=TIGHT, atol=TIGHT)
            assert int(kept[f"{path}.placement.batches"]) == counter


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *((name, steps) for name in ("conv", "dense", "twice") for steps in (1, 3, (1, 3, 2, 2))),
        pytest.param("conv", (1, 30, 2, 2), marks=pytest.mark.slow),
        ("frozen", 3),
        ("not affine", 3),
    ],
)
def test_whole_run(name, steps, momentum):
    """Weights, shared and own statistics after each round; then what is tested and exported."""
    clients, model = away(steps), spread(MODELS[name](momentum))
    oracle, task = make_oracle(model), make_task(model, count=4)
    for round_, result in enumerate(rounds(task, clients, 4), 1):
        oracle.round(clients, round_)
        if round_ in (2, 4):  # in round 2 one client has not trained yet
            assert_same_test(task, result, clients, oracle)
        assert_same(result, oracle)  # also after a calibration


def assert_same_test(task, result, clients, oracle):
    """Compare the calibration over all clients, and the outputs of the model that is tested."""
    everyone = [clients.all_batches(c) for c in clients.all()]
    tested = calibrate_for_test(task, result.state, result.client_states, clients)
    for path, (mean, var) in oracle.calibrate(everyone).items():
        torch.testing.assert_close(tested.running[path].mean, mean, rtol=TIGHT, atol=TIGHT)
        torch.testing.assert_close(tested.running[path].var, var, rtol=TIGHT, atol=TIGHT)
    ((x, _),) = clients.test(0)
    torch.testing.assert_close(
        export(task, tested)(x), oracle.tested(everyone)(x), rtol=0, atol=TIGHT
    )


def test_dsgd_weighs_batches():
    clients, model = away(1), spread(conv_net())
    oracle = make_oracle(model, by_batch=True)
    task = make_task(model, create_algorithm("dsgd", lr=LR))
    for round_, result in enumerate(rounds(task, clients, 3), 1):
        oracle.round(clients, round_)
        assert_same(result, oracle)


def test_only_the_first_batch_is_reported():
    clients, task = away(3), make_task(conv_net())
    received = broadcast(task, task.initial_state)
    reply, _ = client_round(task, received, ClientState(), clients.batches(1, 1))
    with torch.no_grad():
        u = conv_net()[0](clients.batches(1, 1).steps[0][0])
    report = reply.stats["1"]
    assert (report.moments.count, report.num_batches) == (7 * 36, 3)
    torch.testing.assert_close(report.moments.mean, u.mean((0, 2, 3)), rtol=0, atol=TIGHT)
    torch.testing.assert_close(
        report.moments.var, u.var((0, 2, 3), correction=0), rtol=0, atol=TIGHT
    )
    assert not any("placement" in key for part in (reply.update, reply.buffers) for key in part)


def watch(model):
    """Return a list that takes input and output of each BatchNorm layer at each call."""
    seen = []
    for path, layer in model.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.register_forward_hook(
                lambda _m, x, y, path=path: seen.append((path, x[0].detach(), y.detach()))
            )
    return seen


# Each client's data are one batch, the same in each round; weights never move.
FULL = Population(
    holds=(4, 9, 6), batch=(4, 9, 6), steps=(1, 1, 1), shapes=((1, 8, 8),) * 3, again=True
)
STILL = create_algorithm("fedavg", lr=1e-300)  # no step changes a weight


def union():
    return torch.cat([FULL.batches(c, 1).steps[0][0] for c in FULL.all()])


def test_with_own_statistics_of_the_batch_clients_share_one_normalization():
    """Every layer takes one round, because its input depends on the layers before it."""
    task = make_task(conv_net(1.0), STILL)
    result = list(rounds(task, FULL, 2))[-1]
    running, seen = result.state.running, watch(task.model)
    received = broadcast(task, result.state)
    for client in FULL.all():
        client_round(task, received, result.client_states[client], FULL.batches(client, 3))
    assert len(seen) == 2 * 3
    for path, u, y in seen:
        expected = functional.batch_norm(u, running[path].mean, running[path].var)
        torch.testing.assert_close(y, expected, rtol=0, atol=TIGHT)


def test_after_one_round_clients_compute_what_one_machine_does_in_evaluation_mode():
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3, momentum=1.0)
    plain = nn.Sequential(nn.Conv2d(1, 3, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(108, 4))
    plain = spread(plain.double())
    task = make_task(plain, STILL)
    (result,) = rounds(task, FULL, 1)
    outputs = []
    task.model.register_forward_hook(lambda _m, _x, y: outputs.append(y.detach()))
    received = broadcast(task, result.state)
    for client in FULL.all():
        client_round(task, received, result.client_states[client], FULL.batches(client, 2))
    plain.train()(union())  # with momentum 1 its buffers are mean and unbiased variance of all
    with torch.no_grad():
        expected = plain.eval()(union())
    torch.testing.assert_close(torch.cat(outputs), expected, rtol=0, atol=TIGHT)
    torch.testing.assert_close(
        result.state.running["1"].var, plain[1].running_var, rtol=0, atol=TIGHT
    )


def test_a_client_of_few_steps_is_placed_as_one_of_many():
    """Both have the same data; weights stay, γ is 1 and β is 0: a layer's output has mean s."""
    placed = []
    for steps in ((1, 30, 2, 2), (30, 30, 2, 2)):
        clients, task = away(steps), make_task(conv_net(0.1), STILL)
        result = list(rounds(task, clients, 1))[-1]
        seen, received = watch(task.model), broadcast(task, result.state)
        client_round(task, received, result.client_states[0], clients.batches(0, 2))
        placed.append(torch.cat([y.mean((0, 2, 3)) for _, _, y in seen[:2]]))
    torch.testing.assert_close(*placed, rtol=0, atol=TIGHT)
    assert placed[0].abs().max() > 0.4


@pytest.mark.parametrize(("momentum", "share"), [(0.1, 1 - 0.9**9), (None, 9 / 12)])
def test_a_client_that_was_away_follows_by_all_that_the_counter_moved(momentum, share):
    clients = replace(away((1, 3, 2, 2)), absent={3: (0,), 4: (0,)})
    _, left, *_, back = rounds(make_task(conv_net(momentum)), clients, 5)
    old, new = (result.client_states[0].tensors for result in (left, back))
    for path in ("1.placement", "4.placement"):
        assert (int(old[f"{path}.batches"]), int(new[f"{path}.batches"])) == (3, 12)
        for part in ("mean", "var"):
            wanted = torch.lerp(old[f"{path}.{part}"], old[f"{path}.measured_{part}"], share)
            torch.testing.assert_close(new[f"{path}.{part}"], wanted, rtol=TIGHT, atol=TIGHT)


def test_a_round_that_the_server_did_not_take_moves_no_own_statistics():
    clients, model = away(3), spread(conv_net())
    oracle, task = make_oracle(model), make_task(model)
    for round_, result in enumerate(rounds(task, clients, 2), 1):
        oracle.round(clients, round_)
        assert_same(result, oracle)
    received, kept = broadcast(task, result.state), [result.client_states[1]]
    for attempt in (3, 4):  # which draw other batches
        batches = clients.batches(1, attempt)
        kept.append(client_round(task, received, kept[-1], batches)[1])
        oracle.train(1, batches.steps)
        assert_same_own({**result.client_states, 1: kept[-1]}, oracle)
    for part in OWN:
        start, first, second = (state.tensors[f"4.placement.{part}"] for state in kept)
        assert not torch.equal(start, first)
        assert torch.equal(first, second) != part.startswith("measured")


class Shrunk(nn.BatchNorm2d):
    """Torch's layer, whose normalised values are multiplied by a constant before γ and β."""

    factor = 1.0

    def forward(self, x):
        normal = functional.batch_norm(x, None, None, training=True, eps=self.eps)
        return scale_and_shift(self.factor * normal, dict(self.named_parameters()))


@pytest.mark.parametrize("steps", [1, 3])
def test_one_client_alone_normalises_by_the_unbiased_variance(steps):
    """Own and shared mean agree; own variance is biased, the shared one is not: r² = (n-1)/n.

    The first round, in which the client's own statistics are the shared ones, is torch's.
    """
    alone = Population(holds=(6,), batch=(6,), steps=(steps,), shapes=((1, 8, 8),), again=True)
    (x, y), *_ = alone.batches(0, 1).steps
    own = replace_steps(alone, [(x, y)] * steps)  # all its data in each step
    model = spread(conv_net(1.0, eps=1e-30))
    plain = copy.deepcopy(model)
    plain[1].__class__ = plain[4].__class__ = Shrunk
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
    result_of = run_alone(make_task(model), own)
    for round_ in (1, 2, 3):
        for path, n in (("1", 6 * 36), ("4", 6 * 16)):
            plain.get_submodule(path).factor = 1.0 if round_ == 1 else ((n - 1) / n) ** 0.5
        for _ in range(steps):
            optimizer.zero_grad()
            functional.cross_entropy(plain(x), y).backward()
            optimizer.step()
        state = next(result_of)
        for name, value in plain.named_parameters():
            torch.testing.assert_close(state.weights[name], value.detach(), rtol=0, atol=TIGHT)


def replace_steps(clients, steps):
    batches = clients.batches(0, 1)
    return replace(batches, steps=steps, batch_sizes=tuple(len(y) for _, y in steps))


def run_alone(task, batches):
    """Yield the server's state after each round of one client."""
    state, kept = task.initial_state, ClientState()
    while True:
        reply, kept = client_round(task, broadcast(task, state), kept, batches)
        state = server_round(task, state, [reply])
        yield state


class Scaling:
    """Two steps with the same batch, between which a convolution is multiplied by a number."""

    def __init__(self, batch, layer, factor):
        self.batch, self.layer, self.factor = batch, layer, factor

    def __iter__(self):
        yield self.batch
        with torch.no_grad():
            self.layer.weight.mul_(self.factor)
            self.layer.bias.mul_(self.factor)
        yield self.batch


@pytest.mark.parametrize("factor", [0.01, 30.0])
def test_the_scale_of_weights_before_a_layer_does_not_matter(factor):
    clients = away(1)
    task = make_task(spread(conv_net(0.3, eps=1e-20)))
    result = list(rounds(task, clients, 3))[-1]
    still = replace(task, algorithm=STILL)
    seen, received = watch(task.model), broadcast(still, result.state)
    batches = clients.batches(2, 4)
    plain = replace(batches, steps=batches.steps * 2, batch_sizes=(3, 3))
    scaled = replace(plain, steps=Scaling(batches.steps[0], task.model[3], factor))
    (wanted, kept), (reply, moved) = (
        client_round(still, received, result.client_states[2], own) for own in (plain, scaled)
    )
    (_, u, y), (_, v, z) = seen[5], seen[7]
    torch.testing.assert_close(v, factor * u)  # it was multiplied
    torch.testing.assert_close(z, y, rtol=0, atol=TIGHT)
    assert torch.equal(reply.stats["4"].moments.mean, wanted.stats["4"].moments.mean)
    assert all(torch.equal(value, kept.tensors[key]) for key, value in moved.tensors.items())


def test_a_frozen_layer_is_left_alone():
    clients, model = away(3), half_frozen()
    task = make_task(model)
    result = list(rounds(task, clients, 2))[-1]
    before, after = task.initial_state.running["1"], result.state.running["1"]
    assert torch.equal(after.mean, before.mean)
    assert torch.equal(after.var, before.var)
    assert all(set(reply.stats) == {"4"} for reply in result.replies)
    for kept in result.client_states.values():
        for part in (*OWN, "batches"):
            key = f"1.placement.{part}"
            assert torch.equal(kept.tensors[key], task.initial_client_state.tensors[key])


FIVE = ToyClients(sizes=(6, 6, 6, 6, 6))
DATA_FIRST = nn.Sequential(nn.BatchNorm2d(1, momentum=1.0), nn.Flatten(), nn.Linear(64, 4)).double()


def attacked_run(rule, attack, **fields):
    """Return two rounds under an attack on statistics, and the statistics that are tested."""
    torch.manual_seed(0)
    task = replace(make_task(DATA_FIRST), statistics_aggregator=create_aggregator(rule, 1))
    adversary = Adversary(create_attack(attack, **fields), frozenset({3}), "statistics", seed=0)
    results = list(rounds(task, FIVE, 2, faults=Faults(adversary)))
    last = results[-1]
    tested = calibrate_for_test(task, last.state, last.client_states, FIVE, Transport(adversary))
    return results, tested


def is_honest(running, values):
    """Whether statistics are within those of the honest clients' data, and their spread."""
    means, variances = [float(x.mean()) for x in values], [float(x.var()) for x in values]
    width = (max(means) - min(means)) ** 2
    in_range = min(means) <= float(running.mean) <= max(means)
    return in_range and min(variances) * 0.99 <= float(running.var) <= max(variances) + width


ATTACKS = [
    ("sign_flip", {}),
    ("alie", {}),
    ("foe", {"epsilon": 50.0}),
    ("gaussian", {"std": 100.0}),
]


@pytest.mark.parametrize(("attack", "fields"), ATTACKS)
def test_a_robust_rule_keeps_shared_statistics_within_the_honest_range(attack, fields):
    results, tested = attacked_run("median", attack, **fields)
    honest = [c for c in FIVE.all() if c != 3]
    for round_, result in enumerate(results, 1):
        assert not result.rejected
        values = [FIVE.batches(c, round_).steps[0][0] for c in honest]
        assert is_honest(result.state.running["0"], values)
        if attack in ("foe", "gaussian"):  # far enough out for the mean to follow
            followed, _ = attacked_run("mean", attack, **fields)
            assert not is_honest(followed[round_ - 1].state.running["0"], values)
    passed = [torch.cat([x for x, _ in FIVE.all_batches(c).steps]) for c in honest]
    assert is_honest(tested.running["0"], passed)


def run_stacked(task, clients, count):
    return rounds(task, clients, count, train=StackedTrainer(task, 3).train)


STACKABLE = ["conv", "dense", "frozen", "not affine"]
ENGINES = [*((run_stacked, name) for name in STACKABLE), (in_processes, "conv")]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "name"), ENGINES)
def test_other_engines(engine, name):
    """Clients with batches of 5 are stacked: some have trained, one is new in round 3."""
    clients, model = away(2, (5, 5, 3, 5), ()), spread(MODELS[name](0.1))
    oracle, task = make_oracle(model), make_task(model)
    for round_, result in enumerate(engine(task, clients, 4), 1):
        oracle.round(clients, round_)
        assert_same(result, oracle)


# As users run it: float32, unequal clients, local epochs, half of the clients in a round.
SETTINGS = {
    "data": {"name": "patterns", "samples": 120, "test": 40, "size": 8, "classes": 4},
    "model": {"name": "resnet", "widths": [4, 6]},
    "clients": 4,
    "rounds": 3,
    "local_epochs": 2,
    "batch_size": 16,
    "participation": 0.5,
    "partition": "dirichlet_unbalanced=2",
    "algorithm": {"name": "fedavg", "lr": 0.05},
}


def make_plain():
    return fednorm.create_model("resnet", (1, 8, 8), 4, 5, widths=[4, 6])


@pytest.mark.slow
def test_the_exported_model_is_a_plain_one_with_the_reported_accuracy(tmp_path):
    result = fednorm.simulate("alignbn", **SETTINGS, out=tmp_path)
    experiment = build_experiment({**SETTINGS, "strategies": ["alignbn"]})
    batches = list(prepare(experiment, experiment.strategies[0], 0).data.test_batches())
    x, y = (torch.cat(part) for part in zip(*batches, strict=True))
    (file,) = tmp_path.glob("runs/*/model.safetensors")
    plain, loaded = make_plain().eval(), fednorm.load(tmp_path)
    plain.load_state_dict(load_file(file), strict=True)
    assert list(loaded.state_dict()) == list(plain.state_dict())
    outputs = plain(x).detach()
    assert outputs.dtype is torch.float32
    torch.testing.assert_close(loaded(x).detach(), outputs, rtol=0, atol=1e-6)
    found = (outputs.argmax(1) == y).double().mean()
    assert float(found) == pytest.approx(result.final.accuracy, abs=1e-9)
    assert float(functional.cross_entropy(outputs, y)) == pytest.approx(result.final.loss, rel=1e-5)


@pytest.mark.slow
def test_how_often_it_is_tested_does_not_change_the_training():
    often, once = (fednorm.simulate("alignbn", **SETTINGS, eval_every=n) for n in (1, 3))
    assert often.final.loss == once.final.loss
    assert (len(often.history), len(once.history)) == (3, 1)


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"workers": 2}, {"engine": "auto"}])
def test_runs_elsewhere_are_the_same(other, tmp_path):
    here = fednorm.compare(["alignbn"], seeds=[0, 1], engine="loop", **SETTINGS).runs
    there = fednorm.compare(["alignbn"], seeds=[0, 1], **{**SETTINGS, **other}, out=tmp_path).runs
    for one, two in zip(there, here, strict=True):
        assert one.final.accuracy == two.final.accuracy
        assert one.final.loss == pytest.approx(two.final.loss, rel=1e-5)
