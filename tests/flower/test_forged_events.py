"""What a node writes into the log of a run is no event: no forged result, no path, no end."""

import json
import sys
from dataclasses import asdict

import pytest
from flwr.app import Context, RecordDict

from fednorm.errors import ConfigError
from fednorm.experiment.callbacks.base import UNWATCHED, Callback, Monitor
from fednorm.experiment.flower import nodes, submit
from fednorm.experiment.flower.server_app import server
from fednorm.experiment.flower.submit import LineReader, LineWriter
from fednorm.experiment.job import CheckpointPolicy
from fednorm.experiment.results import Evaluation, Event, RunResult
from fednorm.experiment.schema.load import build_experiment
from fednorm.experiment.schema.specs import Spec
from flower.federation import Nodes

EXPERIMENT = build_experiment(
    {
        "strategies": ["fbn"], "seeds": 1, "rounds": 2, "clients": 2, "timeout": 1, "eval_every": 1,
        "engine": "flower",
    }
)  # fmt: skip
MARK = "fednorm> "
TESTED = Evaluation(1, 0.999, 0.0, 0.0)
EVENT = asdict(Event("fbn", "0/../../../../outside", 1, 0.5, evaluation=TESTED))
RESULT = asdict(RunResult("fbn", 0, "finished", (TESTED,), 2, 1.0, 1.0, 1.0, 1.0))
# Text that a node puts into its error message, which the ServerApp logs.
FORGED = {
    "path": MARK + json.dumps({"event": EVENT}),
    "result": MARK + json.dumps({"result": RESULT}),
    "error": MARK + json.dumps({"error": "send money"}),
    "not JSON": MARK + "{",
    "no dictionary": MARK + "[1]",
    "another key": MARK + json.dumps({"key": "00" * 32}),
    "another run": "started run 999",
}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    nodes.build_site.cache_clear()


def make_log(capture, text):
    """Return the log of a run in which a node of two says `text` instead of training."""

    def answer(message, context):
        if context.node_id == 999 and message.metadata.message_type == "train":
            raise RuntimeError(f"sorry\n{text}")
        return nodes.client(message, context)

    config = {"experiment": EXPERIMENT.model_dump_json()}
    server(Nodes(answer, 2, None, config), Context(7, 1, {}, RecordDict(), config))
    out, log = capture
    genuine = out.readouterr().out.splitlines(keepends=True)
    assert "sorry" in log.text
    # The server's log has what a node reports in one line; a node's own output may have more.
    said = f"{log.text}{text}\n"
    # Flower uploads both; the node speaks as early and as late as it can.
    return "".join([genuine[0], said, *genuine[1:], said])


def read_log(log, folder, monkeypatch, experiment=EXPERIMENT, monitor=UNWATCHED):
    """Submit the experiment to a SuperLink that answers with a log."""
    (folder / "log").write_text(f"started run 7\n{log}", encoding="utf-8")
    program = f"import sys; sys.stdout.write(open({str(folder / 'log')!r}).read())"
    monkeypatch.setattr(submit, "_find_flwr", lambda: sys.executable)
    real = submit._stream
    monkeypatch.setattr(
        submit, "_stream", lambda _, env: real([sys.executable, "-c", program], env)
    )
    place = submit.SuperLink("127.0.0.1:1"), folder / "a" / "b" / "out", monitor
    return submit.submit(experiment, *place)


class Told(Callback):
    """Notes what it is told."""

    observes = True

    def __init__(self):
        self.told = []

    def on_start(self, start):
        self.told.append(("start", start.strategy, start.rounds))

    def on_evaluation(self, event):
        self.told.append(("evaluation", event.strategy, event.round))

    def on_end(self, result):
        self.told.append(("end", result.strategy, result.status))


def test_callbacks_follow_where_the_command_runs(tmp_path, monkeypatch, capsys, caplog):
    """They are not sent: the SuperLink's side could not even find their module."""
    log, told = make_log((capsys, caplog), "nothing"), Told()
    read_log(log, tmp_path, monkeypatch, monitor=Monitor([told]))
    tested = [("evaluation", "fbn", n) for n in range(1, EXPERIMENT.rounds + 1)]
    assert told.told[0] == ("start", "fbn", EXPERIMENT.rounds)
    assert told.told[-1] == ("end", "fbn", "finished")
    assert [one for one in told.told if one[0] == "evaluation"] == tested
    ending = EXPERIMENT.model_copy(update={"callbacks": [Spec(name="early_stopping")]})
    with pytest.raises(ConfigError, match="'early_stopping' may end runs, but a run on a Super"):
        read_log(log, tmp_path, monkeypatch, ending)
    submit._write_app(tmp_path / "app", ending, CheckpointPolicy())
    assert "early_stopping" not in (tmp_path / "app" / "pyproject.toml").read_text()


@pytest.mark.parametrize("kind", FORGED)
def test_a_node_cannot_speak_for_the_server(kind, tmp_path, monkeypatch, capsys, caplog):
    log = make_log((capsys, caplog), FORGED[kind])
    (run,) = read_log(log, tmp_path, monkeypatch).runs
    assert run.final.accuracy < 0.999
    out = tmp_path / "a" / "b" / "out"
    written = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert {p for p in written if not p.is_relative_to(out)} <= {
        tmp_path / "log", *tmp_path.glob("flwr/**/*")
    }  # fmt: skip
    assert len((out / "runs" / "fbn-seed0" / "metrics.jsonl").read_text().splitlines()) == 2


def test_lines_count_once_and_in_order(capsys):
    writer = LineWriter()
    for number in range(3):
        writer.send(error=str(number))
    key, *lines = capsys.readouterr().out.splitlines()
    reader = LineReader()
    order = [key, lines[1], lines[0], lines[1], lines[2], lines[2].replace("2", "3")]
    assert [m.error for m in map(reader.read, order) if m] == ["1", "2"]
    assert reader.ignored == 3


@pytest.mark.parametrize("seed", ["0", 1, 0.5, None])
def test_an_event_of_another_run_is_refused(seed, tmp_path, monkeypatch, capsys):
    writer = LineWriter()
    writer.send(event=EVENT | {"seed": seed})
    with pytest.raises(ConfigError, match=r"seed 1, which is not a run|event.seed this version"):
        read_log(capsys.readouterr().out, tmp_path, monkeypatch)
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_an_error_cannot_steer_the_terminal(tmp_path, monkeypatch, capsys):
    LineWriter().send(error="\x1b[2Jgone")
    with pytest.raises(ConfigError, match=r"says: .\[2Jgone") as caught:
        read_log(capsys.readouterr().out, tmp_path, monkeypatch)
    assert "\x1b" not in str(caught.value)


def test_what_a_superlink_would_leave_out_is_refused(tmp_path):
    experiment = EXPERIMENT.model_copy(update={"tune": {"lr": [0.1, 0.2]}})
    with pytest.raises(ConfigError, match="a SuperLink does not tune"):
        submit.submit(experiment, submit.SuperLink("127.0.0.1:1"), tmp_path / "new")
    assert not (tmp_path / "new").exists()
