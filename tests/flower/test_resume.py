"""A SuperLink that is restarted loses nothing: the same experiment continues where it was."""

from dataclasses import replace

import pytest
from flwr.app import Context, RecordDict

from fednorm.experiment.flower import nodes
from fednorm.experiment.flower.server_app import server
from fednorm.experiment.flower.submit import LineReader
from fednorm.experiment.schema.load import build_experiment
from flower.federation import Nodes

VALUES = {
    "strategies": ["fbn"], "seeds": [0, 1], "rounds": 4, "clients": 2, "timeout": 1,
    "eval_every": 2, "engine": "flower",
    "algorithm": {"name": "dsgd", "momentum": 0.0},
}  # fmt: skip

MOMENTUM = {"name": "dsgd", "momentum": 0.9}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    nodes.build_site.cache_clear()


def start(capsys, *, run_id, ends=None, resume=True, **values):
    """Make all runs; with `ends`, the SuperLink is gone before that many training messages."""
    description = build_experiment(VALUES | values).model_dump_json()
    config = {"experiment": description, "checkpoint-every": 1, "resume": resume}
    grid = Nodes(nodes.client, 2, None, config)
    trained, ask = [], grid.push_messages

    def push(messages):
        for message in messages:
            if message.metadata.message_type == "train":
                if ends is not None and len(trained) >= ends:
                    raise ConnectionError("the SuperLink is gone")
                header = message.content["fednorm"]
                trained.append((header["seed"], header["round"], header["client"]))
        return ask(messages)

    grid.push_messages = push
    capsys.readouterr()
    try:
        server(grid, Context(run_id, 1, {}, RecordDict(), config))
    except ConnectionError:
        assert ends is not None
    reader = LineReader()
    found = [m for m in map(reader.read, capsys.readouterr().out.splitlines()) if m]
    events = [m.event for m in found if m.event]
    results = [replace(m.result, seconds=0.0) for m in found if m.result]
    return trained, events, results, [m.sha256 for m in found if m.model]


@pytest.mark.slow
def test_the_same_experiment_continues_after_a_restart(tmp_path, capsys):
    whole = start(capsys, run_id=1)
    assert not list(tmp_path.glob("fednorm/unfinished/*"))  # a second time it is made anew
    # It ends in the third round of the second seed.
    trained, events, _, _ = start(capsys, run_id=2, ends=12)
    assert (trained[-1], len(events)) == ((1, 2, 1), 6)
    again, *rest = start(capsys, run_id=3)
    assert again == [(1, 3, 0), (1, 3, 1), (1, 4, 0), (1, 4, 1)]
    assert rest == list(whole[1:])  # all rounds are told, also those of before
    assert not list(tmp_path.glob("fednorm/unfinished/*"))


def test_momentum_that_nodes_kept_begins_anew(capsys, caplog):
    start(capsys, run_id=1, ends=6, seeds=1, algorithm=MOMENTUM)
    trained, _, (result,), _ = start(capsys, run_id=2, seeds=1, algorithm=MOMENTUM)
    assert len(trained) == 2
    assert result.rounds == 4
    assert "without the momentum" in caplog.text


def test_it_can_be_started_over(capsys):
    start(capsys, run_id=1, ends=6, seeds=1)
    trained, *_ = start(capsys, run_id=2, resume=False, seeds=1)
    assert len(trained) == 8


@pytest.mark.slow
@pytest.mark.parametrize("keeping", [{"strategies": ["fedbn"]}, {"algorithm": "scaffold"}])
def test_what_nodes_keep_cannot_be_resumed_so_that_the_run_is_made_anew(keeping, capsys):
    start(capsys, run_id=1, ends=6, seeds=1, **keeping)
    trained, events, (result,), _ = start(capsys, run_id=2, seeds=1, **keeping)
    assert len(trained) == 8
    assert [event.round for event in events] == [1, 2, 3, 4]
    assert result.status == "finished"
