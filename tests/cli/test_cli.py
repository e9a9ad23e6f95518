"""The command line as a person uses it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

import fednorm
from fednorm.attacks import ATTACKS
from fednorm.cli import app, main
from fednorm.cli.listing import KINDS
from fednorm.errors import NonFiniteLossError
from fednorm.strategies import STRATEGIES
from fednorm.strategies.base import FIXED_STATISTICS_REMEDY

QUICK = ["--rounds", "3", "--seeds", "1", "--clients", "3", "--workers", "1"]


@pytest.fixture
def call():
    def invoke(*arguments):
        environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"}
        return subprocess.run(
            [sys.executable, "-m", "fednorm", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
            check=False,
        )

    return invoke


def inside(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "120"})


@pytest.mark.slow
def test_compare_says_what_to_try_after_a_divergence(tmp_path):
    settings = [*QUICK, "--seeds", "2", "--lr", "1e30", "--out", tmp_path]
    result = inside("compare", *settings, "--strategies", "naive,fbn")
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.partition("Report:")[2].split())
    assert said.count(" seed 0, diverged: ") == 2  # the first of each strategy
    assert said.count(" diverged: ") == 2
    assert NonFiniteLossError.REMEDY in said
    assert FIXED_STATISTICS_REMEDY in said


@pytest.mark.slow
def test_compare_writes_everything(tmp_path):
    result = inside("compare", *QUICK, "--strategies", "centralized,fbn,fedbn", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "fbn" in result.output
    assert "report.html" in result.output
    files = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert {
        "results.json",
        "config.toml",
        "curves.png",
        "report.html",
        "runs/fbn-seed0/metrics.jsonl",
        "runs/centralized-seed0/metrics.jsonl",
    } <= files
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["schema"] == 1
    assert {"environment", "config", "runs"} <= set(results)
    for run in results["runs"]:
        assert {
            "strategy",
            "seed",
            "final",
            "best_accuracy",
            "rounds",
            "exchanges_per_round",
            "bytes_up_per_round",
            "bytes_down_per_round",
            "seconds",
        } <= set(run)
        assert 0 <= run["final"]["accuracy"] <= 1
    personal = results["runs"][2]
    assert len(personal["final"]["per_client"]) == 3


@pytest.mark.slow
def test_run_repeats_what_compare_wrote(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    flags = ["--set", "algorithm.lr=0.2", "--partition", "dirichlet=0.5", "--strategies", "fbn"]
    assert inside("compare", *QUICK, *flags, "--out", first).exit_code == 0
    assert inside("run", first / "config.toml", "--out", second).exit_code == 0
    results = [json.loads((f / "results.json").read_text()) for f in (first, second)]
    assert results[0]["config"] == results[1]["config"]
    assert results[0]["config"]["algorithm"]["lr"] == 0.2
    assert results[0]["runs"][0]["final"] == results[1]["runs"][0]["final"]


@pytest.mark.slow
def test_flags_win_over_the_file_and_set_over_flags(tmp_path):
    (tmp_path / "mine.toml").write_text('rounds = 9\nclients = 4\nalgorithm = "fedavg"\n')
    arguments = ["compare", "--config", tmp_path / "mine.toml", *QUICK, "--strategies", "gn"]
    result = inside(*arguments, "--lr", "0.3", "--set", "clients=5", "--out", tmp_path / "o")
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "o" / "results.json").read_text())["config"]
    assert (config["rounds"], config["clients"]) == (3, 5)
    assert config["algorithm"] == {"name": "fedavg", "lr": 0.3}


@pytest.mark.slow
def test_sweep_compares_values_of_a_field(tmp_path):
    sweep = ["--sweep", "strategy.stats_momentum=0.05,none", "--strategies", "fbn,gn"]
    result = inside("compare", *QUICK, *sweep, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert [run["strategy"] for run in runs] == [
        "fbn stats_momentum=0.05",
        "fbn stats_momentum=none",
        "gn",
    ]
    assert runs[0]["final"]["loss"] != runs[1]["final"]["loss"]
    again = ["--out", tmp_path / "again", "--workers", "1"]
    assert inside("run", tmp_path / "config.toml", *again).exit_code == 0


@pytest.mark.slow
def test_attacks_and_defences_are_options(tmp_path):
    chosen = ["--byzantine", 1, "--attack-target", "statistics", "--aggregator", "trimmed_mean"]
    swept = ["--sweep", "attack=foe,alie", "--sweep", "statistics_aggregator=mean,nnm > median"]
    few = ["--strategies", "fbn", "--client-dropout", 0.1, "--set", "model.hidden=[4]"]
    arguments = [*chosen, *swept, *few, "--clients", 6]
    result = inside("compare", *QUICK, *arguments, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    results = json.loads((tmp_path / "results.json").read_text())
    assert [run["strategy"] for run in results["runs"]] == [
        "fbn, foe, mean",
        "fbn, foe, nnm > median",
        "fbn, alie, mean",
        "fbn, alie, nnm > median",
    ]
    assert results["config"]["aggregator"] == "trimmed_mean"
    assert "Attacks and defences" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_too_few_good_replies_are_an_error_of_the_command(tmp_path):
    chosen = ["--attack", "non_finite", "--byzantine", 1, "--set", "min_replies=3"]
    result = inside("compare", *QUICK, "--strategies", "fbn", *chosen, "--out", tmp_path)
    assert result.exit_code == 1
    assert "fbn, seed 0, stopped: round 1 has only 2 usable replies" in result.output


@pytest.mark.slow
def test_fresh_starts_over(tmp_path):
    arguments = ["compare", "--strategies", "gn", "--out", tmp_path]
    assert inside(*arguments, *QUICK).exit_code == 0
    (tmp_path / "mine.txt").write_text("keep me")
    assert inside(*arguments, *QUICK, "--batch-size", "7", "--fresh").exit_code == 0
    assert (tmp_path / "mine.txt").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "--strategies", "fnb"], "did you mean 'fbn'"),
        (["compare", "--partition", "gamma=3"], "gamma"),
        (["run", "missing.toml"], "there is no file 'missing.toml'"),
        (["show", "strategy", "fb"], "did you mean 'fbn'"),
        (["list", "strategie"], "did you mean 'strategies'"),
        (["compare", "--set", "rouns=3"], "did you mean 'rounds'"),
        (
            ["compare", "--set", "workers=2"],
            "'workers' is no key of an experiment, but an option: --workers",
        ),
        (["compare", "--set", "lr=0.1"], "did you mean 'algorithm.lr'?"),
        (["compare", "--set", "strategy.momentm=0.1"], "did you mean 'stats_momentum'"),
        (["compare", "--set", "privacy.clp=1"], "Known: clip, clip_statistics, delta, noise"),
        (["compare", "--strategies", "FBN"], "did you mean 'fbn'"),
        (["compare", "--seeds", "x"], "seeds are a number or a list such as 0,7, not 'x'."),
        (["compare", "--seeds", "-1"], "at least 1 seed is needed, not -1"),
        (["compare", "--device", "gpu"], "device is 'auto', 'cpu', 'cuda', 'cuda:1'"),
        (["compare", "--device", "meta"], "not 'meta'"),
        (["compare", "--device", "xpu"], "this machine has none, or torch was installed without"),
        (["compare", "--sweep", "strategy.groupz=1,2"], "none of the chosen strategies"),
    ],
)
def test_a_mistake_gets_a_message(tmp_path, monkeypatch, capsys, arguments, message):
    out = ["--out", str(tmp_path / "o")] if arguments[0] in ("compare", "run") else []
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("sys.argv", ["fednorm", *arguments, *out])
    monkeypatch.setattr("fednorm.cli.keep_memory", lambda: None)  # of the tests' process
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


@pytest.mark.slow
def test_list_and_show_cover_the_registry():
    for attack in ATTACKS:
        assert attack in inside("list", "attacks").output
        assert "Client:" in inside("show", "attack", attack).output
    listed = inside("list", "strategies").output
    for name in STRATEGIES:
        assert name in listed
        shown = inside("show", "strategy", name).output
        assert "arXiv" in shown
    all_batches = inside("list").output
    for word in ("strategies", "algorithms", "partitions", "data", "models", "fbn_cnn", "shards"):
        assert word in all_batches
    assert "freeze_round" in inside("show", "strategy", "fixbn").output


@pytest.mark.slow
def test_what_show_says_of_an_entry_it_says_of_no_other():
    for kind, entries in KINDS.items():
        texts = [inside("show", kind, name).output for name in entries]
        bodies = [text.partition("\n\n")[2].partition("Parameters")[0] for text in texts]
        assert all(len(body.split()) > 5 for body in bodies)
        assert len(set(bodies)) == len(entries)
    assert "2f + 2" in inside("show", "aggregator", "krum").output  # of several in one file
    assert "Unbitrium" in inside("show", "model", "tutorial_cnn").output


def test_the_help_of_compare_fits_on_a_screen_and_cuts_nothing():
    told = CliRunner().invoke(app, ["compare", "-h"], terminal_width=80).output
    lines = told.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    assert "…" not in told.replace("KEY=VALUE,…", "")
    groups = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert {"Federation:", "Training and evaluation:", "Faults:", "Machine:"} <= set(groups)
    assert "Options:" not in groups  # every option has its group


def test_the_version_is_told():
    assert inside("--version").output == f"fednorm {fednorm.__version__}\n"


def test_lists_tell_the_reference_keys_and_how_a_partition_is_written():
    assert "centralized" in inside("list", "strategies").output
    assert "one machine" in inside("show", "strategy", "centralized").output
    partitions = inside("list", "partitions").output
    assert "dirichlet=<alpha>" in partitions
    assert "feature_shift[=<kind>]" in partitions
    assert "client_state_memory" in inside("list", "keys").output


def test_the_list_of_commands_is_not_cut():
    said = CliRunner().invoke(app, ["-h"], env={"COLUMNS": "80"}).output
    said = said.partition("Commands:")[2]
    assert "..." not in said
    assert "write a table, a plot and a report" in " ".join(said.split())


def test_help_teaches():
    for command in ([], ["compare"], ["run"], ["list"], ["show"]):
        result = inside(*command, "--help")
        assert result.exit_code == 0
    assert "--partition" in inside("compare", "--help").output


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_ends_cleanly_and_keeps_what_is_done(tmp_path, workers):
    command = [sys.executable, "-m", "fednorm", "compare", "--strategies", "fbn,gn"]
    options = ["--rounds", "100000", "--eval-every", "2", "--seeds", "1", "--out", str(tmp_path)]
    with subprocess.Popen(
        [*command, *options, "--workers", str(workers)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        metrics = tmp_path / "runs" / "fbn-seed0" / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "Interrupted" in err
    assert "Report" in out
    results = json.loads((tmp_path / "results.json").read_text())
    assert {run["status"] for run in results["runs"]} == {"interrupted"}
    assert len(results["runs"]) == workers
    assert results["runs"][0]["rounds"] >= 2
    assert (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_an_out_that_is_a_file_gets_a_message_and_no_traceback(call, tmp_path):
    (tmp_path / "file").write_text("mine")
    result = call("compare", *QUICK, "--strategies", "gn", "--out", tmp_path / "file")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "is a file; choose a folder" in result.stderr
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.slow
def test_ctrl_c_during_imports_is_one_sentence(tmp_path):
    (tmp_path / "typer.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen(
        [sys.executable, "-m", "fednorm", "list"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines() == [
        "Interrupted; the same command starts again and keeps what is finished."
    ]


@pytest.mark.slow
def test_run_trains_on_a_folder_with_what_it_holds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = "--strategies gn,fbn --clients 3 --seeds 1 --rounds 3 --callback tensorboard"
    plain = {"TensorBoard.on_start": lambda *_: None, "TensorBoard.on_round": lambda *_: None}
    for name, function in plain.items():
        monkeypatch.setattr(f"fednorm.experiment.callbacks.loggers.{name}", function)
    assert inside("compare", *options.split()).exit_code == 0
    (folder,) = (tmp_path / "results").glob("compare-*")
    found = inside("run", "results/latest", "--extend", "5", "--workers", "1")
    assert found.exit_code == 0, found.output
    runs = json.loads((folder / "results.json").read_text())["runs"]
    assert [r["rounds"] for r in runs] == [5, 5]
    held = (folder / "config.toml").read_text()
    assert "rounds = 5" in held
    assert "tensorboard" in held
    found = inside("run", "results/latest", "--extend", "4")
    assert found.exit_code != 0
    assert "not to 4" in str(found.exception)
    assert inside("run", "results/latest", "--extend", "5", "--fresh").exit_code != 0


PANELS = """
title = "Two"
[experiment]
strategies = ["gn"]
clients = 3
seeds = 1
rounds = 3
eval_every = 1
callbacks = [{ name = "early_stopping", patience = 9 }]
[[panels]]
title = "sorted"
set = { partition = "gamma=0" }
[[panels]]
title = "iid"
set = { partition = "iid" }
"""


@pytest.mark.slow
def test_panels_take_callbacks_and_refuse_what_is_for_one_experiment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.toml").write_text(PANELS)
    added = ["--callback", "early_stopping(patience=1, min_delta=1.0)", "--workers", "1"]
    found = inside("run", "two.toml", "--out", "two", *added)
    assert found.exit_code == 0, found.output
    for panel in json.loads((tmp_path / "two" / "results.json").read_text())["panels"]:
        assert [c["patience"] for c in panel["config"]["callbacks"]] == [9, 1]
        assert [run["rounds"] for run in panel["runs"]] == [2]
    for options in (["--extend", "9"], ["--no-resume"], ["--keep-state"]):
        found = inside("run", "two.toml", *options)
        assert "are for one experiment, but 'two.toml' has panels" in str(found.exception)
    found = inside("run", "two", "--extend", "9")
    assert "name the folder of one, such as 'two/iid'" in str(found.exception)
