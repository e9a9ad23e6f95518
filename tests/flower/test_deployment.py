"""A real federation: TLS, authenticated nodes, one that is killed, one that is not known.

All of it on the loopback interface; the processes end with the tests.
"""

import pytest
from safetensors.torch import load_file

from fednorm.errors import ConfigError
from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.flower.submit import SuperLink, submit
from fednorm.experiment.run import Monitor
from fednorm.experiment.schema.load import build_experiment
from flower.deployment import Deployment, at_home

pytestmark = pytest.mark.slow  # and so among the first: it takes longest, mostly waiting
VALUES = {
    "strategies": ["fbn"], "seeds": 1, "rounds": 3, "clients": 2, "model": "cnn", "eval_every": 1,
    "engine": "flower", "timeout": 60,
}  # fmt: skip


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    with Deployment(tmp_path_factory.mktemp("deployment")) as found:
        found.node(0)
        found.node(1)
        yield found
    homes = [found.folder / name for name in ("superlink", "node0", "node1", "node2")]
    assert not any(at_home(home) for home in homes)


def link(deployment):
    return SuperLink(deployment.address, deployment.folder / "ca.crt")


def model(deployment):
    paths = (deployment.folder / "superlink" / "fednorm").glob("*/*.safetensors")
    return load_file(max(paths, key=lambda path: path.stat().st_mtime))


def test_a_command_in_an_experiment_is_not_run(deployment, tmp_path):
    """The error comes from the SuperLink's machine, over the signed lines of the log."""
    attack = {"data": {"name": "os:system", "command": f"touch {tmp_path / 'mark'}"}}
    with pytest.raises(ConfigError, match="was sent to this machine, which allows registered"):
        submit(build_experiment(VALUES | attack), link(deployment), tmp_path / "out")
    assert not (tmp_path / "mark").exists()


def test_an_unknown_node_is_refused(deployment):
    node = deployment.node(2, register=False)
    assert node.wait(60) != 0
    assert "Failed to activate SuperNode" in deployment.log("node2")
    deployment.kill("node2")


def test_a_deployment_gives_what_the_simulator_gives_and_ends_with_the_nodes_that_are_left(
    deployment, tmp_path
):
    """Of three rounds the first two are compared; then a node is killed in mid-run."""
    events = []

    def seen(event):
        events.append(event)
        if event.round == 2:
            deployment.kill("node1")

    run = submit(
        build_experiment(VALUES), link(deployment), tmp_path / "there", Monitor([seen])
    ).runs[0]
    here = run_comparison(
        build_experiment(VALUES | {"engine": "loop"}), folder=tmp_path / "here"
    ).runs[0]
    assert run.status == "finished"
    assert [event.round for event in events] == [1, 2, 3]
    assert run.history[:2] == here.history[:2]
    assert run.history[2] != here.history[2]
    assert "node1" not in deployment.processes
    (path,) = (tmp_path / "here").glob("runs/*/model.safetensors")
    expected, found = load_file(path), model(deployment)
    assert {name: value.shape for name, value in found.items()} == {
        name: value.shape for name, value in expected.items()
    }
    there, ours = (
        path.read_text().splitlines() for path in sorted(tmp_path.glob("*/runs/*/metrics.jsonl"))
    )
    assert there[:2] == ours[:2]
