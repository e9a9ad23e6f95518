"""What a node writes into the log of a run is no event: no forged result, no path, no end."""

import json
import sys
from dataclasses import asdict

import pytest
from flwr.app import Context, RecordDict

from fednorm.errors import ConfigError
from fednorm.experiment.flower import nodes, submit
from fednorm.experiment.flower.server_app import server
from fednorm.experiment.flower.signed_lines import LineReader, LineWriter
from fednorm.experiment.results import Evaluation, Event, RunResult
from fednorm.experiment.schema.load import build_experiment
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
    assert text in log.text
    # Flower uploads both; the node speaks as early and as late as it can.
    return "".join([genuine[0], log.text, *genuine[1:], log.text])


def read_log(log, folder, monkeypatch):
    """Submit the experiment to a SuperLink that answers with a log."""
    (folder / "log").write_text(f"started run 7\n{log}", encoding="utf-8")
    program = f"import sys; sys.stdout.write(open({str(folder / 'log')!r}).read())"
    monkeypatch.setattr(submit, "_find_flwr", lambda: sys.executable)
    real = submit._stream
    monkeypatch.setattr(
        submit, "_stream", lambda _, env: real([sys.executable, "-c", program], env)
    )
    return submit.submit(EXPERIMENT, submit.SuperLink("127.0.0.1:1"), folder / "a" / "b" / "out")


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
    with pytest.raises(ConfigError, match=r"seed 1, which is no run|event.seed this version"):
        read_log(capsys.readouterr().out, tmp_path, monkeypatch)
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_an_error_cannot_steer_the_terminal(tmp_path, monkeypatch, capsys):
    LineWriter().send(error="\x1b[2Jgone")
    with pytest.raises(ConfigError, match=r"says: .\[2Jgone") as caught:
        read_log(capsys.readouterr().out, tmp_path, monkeypatch)
    assert "\x1b" not in str(caught.value)
