"""Flower's own quickstart with the lines of docs/flower.md: training, tests, final model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.server import LegacyContext, ServerConfig
from flwr.server.workflow.default_workflows import default_init_params_workflow
from flwr.serverapp.strategy import FedAvg
from torch import nn

import fednorm.flower
from docs.pages import list_blocks
from fednorm.engines.flower import wire
from fednorm.errors import ConfigError
from flower import template
from flower.federation import Nodes
from flower.template import CONFIG, Net, load_data, make_client, make_server

PLACES = [{"partition-id": i, "num-partitions": 3} for i in range(3)]
PLAIN = ["naive", "fbn", "dualbn", "heterofl"]
OTHER = ["gn", "gn_ws", "fedfn", "switchnorm", "fedwon", "fedbn", "silobn"]
UNPACK = r"`model = fednorm\.flower\.unpack\(msg, Net\(\), context\)`"


def nodes(client, runtime=Nodes):
    return runtime(client, 3, PLACES, CONFIG)


def run(name, client, path, central=None, runtime=Nodes):
    torch.manual_seed(0)
    server, grid = make_server(name, path, central), nodes(client, runtime)
    server(grid, Context(7, 0, {}, RecordDict(), dict(CONFIG)))
    return (*server.seen, grid)


def score(model, node):
    _, loader = load_data(node, 3, CONFIG["batch-size"])
    return (*template.test_fn(model, loader, "cpu"), len(loader.dataset))


def mean_scores(models):
    """Return what FedAvg makes of the nodes' metrics."""
    scores = [score(model, node) for node, model in enumerate(models)]
    total = sum(examples for *_, examples in scores)
    return [sum(s[i] * s[2] for s in scores) / total for i in (0, 1)]


def test_the_template_is_changed_as_the_page_says():
    written = {line.strip() for line in Path(template.__file__).read_text().splitlines()}
    blocks = [block for block in list_blocks("diff") if block.page == "docs/flower.md"]
    lines = [line for block in blocks for line in block.text.splitlines() if line[:3] != "---"]
    added = {line[1:].strip() for line in lines if line[0:1] == "+"}
    removed = {f"# Flower: {line[1:].strip()}" for line in lines if line[0:1] == "-"}
    assert len(blocks) == 2
    assert removed
    assert added | removed <= written


@pytest.mark.parametrize("name", PLAIN)
def test_the_template_works_with_the_lines_of_the_page(name, tmp_path):
    """Evaluation on nodes and at the server, metrics, configuration, and the saved model."""
    path = tmp_path / "final_model.pt"
    client = make_client(answers=name == "heterofl")
    strategy, result, grid = run(name, client, path)
    saved = Net()
    saved.load_state_dict(torch.load(path, weights_only=True), strict=True)
    loss, accuracy = mean_scores([saved] * 3)
    last = result.evaluate_metrics_clientapp[2]
    assert last["eval_loss"] == pytest.approx(loss, rel=1e-4)
    assert last["eval_acc"] == pytest.approx(accuracy)
    central = template.global_evaluate(2, ArrayRecord(saved.state_dict()))
    assert result.evaluate_metrics_serverapp[2] == central
    assert sorted(result.evaluate_metrics_serverapp) == [0, 1, 2]
    losses = [result.train_metrics_clientapp[r]["train_loss"] for r in (1, 2)]
    assert losses[1] < losses[0]
    asked = [m for m in grid.sent if m.metadata.message_type == "train" and "config" in m.content]
    assert {m.content["config"]["lr"] for m in asked} == {0.05}
    x = torch.stack([s["img"] for s in template.samples(9, 5)])
    torch.testing.assert_close(saved.eval()(x), strategy.model(x))
    before = torch.manual_seed(0) and Net()
    assert not torch.equal(before.fc.weight, saved.fc.weight)


def test_an_evaluation_costs_what_it_costs_in_flower(tmp_path):
    """Weights travel once; beside them a line of text."""
    *_, grid = run("dualbn", make_client(), tmp_path / "model.pt")
    sent = [m for m in grid.sent if m.metadata.message_type == "evaluate"]
    (message,) = {tuple(sorted(m.content)) for m in sent if "arrays" in m.content}
    assert message == ("arrays", "config", wire.HEADER)
    arrays = next(m.content["arrays"] for m in sent if "arrays" in m.content)
    assert arrays.count_bytes() == ArrayRecord(Net().state_dict()).count_bytes()


@pytest.mark.parametrize("name", OTHER)
def test_what_the_plain_model_cannot_test_is_one_error_with_the_line_to_change(name, tmp_path):
    with pytest.raises(ConfigError, match=UNPACK) as raised:
        run(name, make_client(), tmp_path / "model.pt", central=lambda _: None)
    assert f"not what '{name}' trains" in str(raised.value)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("name", OTHER)
def test_unpack_gives_the_model_that_is_tested(name, tmp_path):
    def central(strategy):
        return lambda *_: MetricRecord({"weights": float(len(strategy.model.state_dict()))})

    client = make_client(unpacks=True)
    strategy, result, grid = run(name, client, tmp_path / "model.pt", central=central)
    if name in {"fedbn", "silobn"}:
        models = [own_model(result, grid.contexts[1000 - node]) for node in range(3)]
        assert not result.evaluate_metrics_serverapp
    else:
        models = [strategy.model] * 3
        assert sorted(result.evaluate_metrics_serverapp) == [0, 1, 2]
    loss, accuracy = mean_scores(models)
    assert result.evaluate_metrics_clientapp[2]["eval_loss"] == pytest.approx(loss, rel=1e-4)
    assert result.evaluate_metrics_clientapp[2]["eval_acc"] == pytest.approx(accuracy)
    with pytest.raises(RuntimeError, match="state_dict"):
        Net().load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))


def own_model(result, context):
    """Return a node's own model in plain torch: what is shared, and what it keeps."""
    model = Net()
    kept = wire.load_client_state(context.state).tensors
    model.load_state_dict({**result.arrays.to_torch_state_dict(), **kept}, strict=True)
    return model.eval()


def test_a_central_evaluation_in_the_plain_model_is_told_what_to_test(tmp_path):
    with pytest.raises(ConfigError, match=r"Test `model = strategy\.model` there"):
        run("gn", make_client(unpacks=True), tmp_path / "model.pt")


def test_a_central_evaluation_without_a_global_model_is_skipped(tmp_path, caplog):
    _, result, _ = run("fedbn", make_client(unpacks=True), tmp_path / "model.pt")
    assert not result.evaluate_metrics_serverapp
    assert caplog.text.count("evaluate_fn is not called") == 1


class Simulated(Nodes):
    """Nodes whose errors are as Flower's simulation reports them, behind a traceback."""

    def _answer(self, message):
        answer = super()._answer(message)
        if answer.has_error():
            said = answer.error.reason.partition(": ")[2]
            answer.error._reason = (
                "<class 'ray.exceptions.RayTaskError(ClientAppException)'>:<'\x1b[36mray::"
                f"ClientAppActor.run()\x1b[39m (pid=15923, ip=192.0.2.2){' ' * 600}\n"
                "flwr.clientapp.client_app.ClientAppException: \n"
                "Exception ClientAppException occurred. Message: "
                f"{said}\n'>"
            )
        return answer


@pytest.mark.parametrize("runtime", [Nodes, Simulated])
def test_an_app_without_the_query_is_told_the_lines(runtime, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "flower.md").read_text(encoding="utf-8")
    shown = page.partition("--- client_app.py, for hbn, heterofl and alignbn\n")[2].partition(
        "```"
    )[0]
    lines = "\n".join(line[1:] for line in shown.splitlines())
    assert '@app.query("fednorm")' in lines
    with pytest.raises(ConfigError, match=re.escape(lines)) as caught:
        run("heterofl", make_client(), tmp_path / "model.pt", runtime=runtime)
    assert (
        str(caught.value)
        .splitlines()[-1]
        .endswith("No query function registered with name 'fednorm'")
    )


def plain_train(msg, _context):
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    return plain_reply(model, msg)


def plain_reply(model, msg):
    metrics = MetricRecord({"train_loss": 0.0, "num-examples": 1})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=msg)


def unpacked_train(msg, context):
    return plain_reply(fednorm.flower.unpack(msg, Net(), context), msg)


@pytest.mark.parametrize("runtime", [Nodes, Simulated])
@pytest.mark.parametrize("train", [plain_train, unpacked_train])
def test_a_train_function_without_the_lines_is_told_them(train, runtime, tmp_path):
    app = ClientApp()
    app.train()(train)
    with pytest.raises(ConfigError, match=rf"{UNPACK}.*\n?.*fednorm\.flower\.pack"):
        run("fbn", app, tmp_path / "model.pt", runtime=runtime)


class Old(NumPyClient):
    """A client of Flower's legacy interface."""

    def fit(self, parameters, config):
        return parameters, 1, config


@pytest.mark.parametrize("runtime", [Nodes, Simulated])
def test_a_legacy_client_is_told(runtime, tmp_path):
    app = ClientApp(client_fn=lambda context: Old().to_client())  # noqa: ARG005 (Flower's name)
    with pytest.raises(ConfigError, match="a legacy one"):
        run("fbn", app, tmp_path / "model.pt", runtime=runtime)


def test_secure_aggregation_is_refused_on_both_sides(tmp_path):
    app = ClientApp(mods=[secaggplus_mod])
    app.train(mods=[secaggplus_mod])(template.train)
    for runtime in (Nodes, Simulated):
        with pytest.raises(ConfigError, match="SecAgg"):
            run("fbn", app, tmp_path / "model.pt", runtime=runtime)
    strategy = fednorm.flower.NormStrategy("fbn", model=Net())
    context = LegacyContext(
        Context(7, 0, {}, RecordDict(), {}), ServerConfig(num_rounds=1), strategy
    )
    with pytest.raises(ConfigError, match="legacy server"):  # how SecAgg+ and all others begin
        default_init_params_workflow(nodes(make_client()), context)


def test_the_arrays_may_have_another_key():
    app, seen = make_client(unpacks=True), []
    app.evaluate("other")(lambda msg, context: seen.append((msg, context)))
    server = FedAvg(arrayrecord_key="model", min_available_nodes=3)
    strategy = fednorm.flower.NormStrategy("fbn", model=Net(), server=server)
    grid = nodes(app)
    result = strategy.start(grid, num_rounds=1, train_config=template.ConfigRecord({"lr": 0.05}))
    assert {"eval_acc", "eval_loss"} <= set(result.evaluate_metrics_clientapp[1])
    sent = [set(m.content.array_records) for m in grid.sent]
    assert all("arrays" not in keys for keys in sent)


def test_a_model_may_move_after_it_is_unpacked():
    """A move to another device gives a model other buffers."""

    def trained(move):
        app = ClientApp()

        @app.train()
        def train(msg, context):
            model = fednorm.flower.unpack(msg, Net(), context)
            move(model)
            trainloader, _ = load_data(context.node_config["partition-id"], 3, 8)
            template.train_fn(model, trainloader, 1, 0.05, "cpu")
            return fednorm.flower.pack(model, msg, context, examples=3)

        strategy = fednorm.flower.NormStrategy(
            "fedbn", model=Net(), min_available_nodes=3, fraction_evaluate=0.0
        )
        grid = nodes(app)
        strategy.start(grid, ArrayRecord(net.state_dict()), num_rounds=1)
        return wire.load_client_state(grid.contexts[1000].state).tensors

    net = Net()
    moved = trained(lambda model: model._apply(torch.clone))
    expected = trained(lambda model: model)
    assert moved["bn1.num_batches_tracked"] > 0
    assert all(torch.equal(moved[key], value) for key, value in expected.items())


def test_the_page_shows_the_lines_that_are_changed():
    root = Path(__file__).parents[2]
    page = (root / "docs" / "flower.md").read_text(encoding="utf-8")
    diff = page.partition("```diff\n")[2].partition("```")[0].splitlines()
    source = Path(template.__file__).read_text(encoding="utf-8")
    lines = {line.strip() for line in source.splitlines()}
    added = {line[1:].strip() for line in diff if line.startswith("+")}
    removed = {line[1:] for line in diff if line.startswith("-") and not line.startswith("---")}
    assert (len(added), len(removed)) == (7, 7)
    assert added <= lines
    assert {f"# Flower: {line}" for line in removed} <= lines


def test_arrays_that_fit_but_compute_something_else_are_refused():
    """BatchNorm without running statistics has the keys of GroupNorm."""
    plain = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.Flatten()
    )
    strategy = fednorm.flower.NormStrategy("gn", model=plain)
    arrays = strategy.start(Nodes(make_client(), 0), num_rounds=0) and strategy._arrays()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*use_fednorm_load"):
        plain.load_state_dict(arrays.to_torch_state_dict())
    strategy.start(Nodes(make_client(), 0), arrays, num_rounds=0)
    assert strategy._arrays().keys() == arrays.keys()


@pytest.mark.slow
def test_the_template_on_the_simulation_runtime(tmp_path):
    """First dualbn, then gn, whose evaluate function does not call unpack."""
    path = tmp_path / "final_model.pt"
    folders = [Path(__file__).parents[1], Path(fednorm.__file__).parents[1]]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "FLWR_HOME": str(tmp_path / "home"),
        "RAY_worker_niceness": "0",
    }
    done = subprocess.run(
        [sys.executable, "-m", "flower.template", "dualbn", str(path), "gn", str(tmp_path / "gn")],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    Net().load_state_dict(torch.load(path, weights_only=True), strict=True)
    _, first, last = re.split("Starting .* strategy", done.stderr)
    assert "'eval_acc'" in first
    assert "'accuracy'" in first
    assert done.returncode != 0
    assert re.search(f"ConfigError: no node could evaluate.*{UNPACK}", last)
    assert "Missing key(s) in state_dict" in last[-2000:]
    assert len(last.splitlines()) < 600  # Flower's own report of three nodes
