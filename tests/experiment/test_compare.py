"""Comparisons: what is kept, what is not repeated, and what happens when something ends early."""

import json
import logging
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import fednorm
from fednorm.errors import ConfigError, NonFiniteLossError
from fednorm.experiment import comparison, job
from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.prepare import prepare
from fednorm.experiment.run import Monitor
from fednorm.experiment.schema.load import build_experiment
from fednorm.strategies import STRATEGIES

QUICK = {"rounds": 4, "seeds": 2, "clients": 3, "eval_every": 2}


def rows(folder, name):
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_results_are_plain_and_complete(tmp_path):
    found = fednorm.compare(["centralized", "fbn"], out=tmp_path, **QUICK)
    assert [(r.strategy, r.seed, r.status) for r in found.runs] == [
        ("centralized", 0, "finished"),
        ("centralized", 1, "finished"),
        ("fbn", 0, "finished"),
        ("fbn", 1, "finished"),
    ]
    run = found.runs[2]
    assert [e.round for e in run.history] == [2, 4]
    assert run.rounds == 4
    assert run.exchanges_per_round == 1
    assert found.runs[0].exchanges_per_round == 0
    assert [line["round"] for line in rows(tmp_path, "fbn-seed1")] == [1, 2, 3, 4]
    assert "accuracy" in rows(tmp_path, "fbn-seed1")[1]
    assert "accuracy" not in rows(tmp_path, "fbn-seed1")[2]
    assert {"torch", "python", "fednorm"} <= set(found.environment)


def test_finished_runs_are_not_repeated(tmp_path):
    first = run_comparison(build_experiment({**QUICK, "strategies": ["fbn"]}), folder=tmp_path)
    rounds = []
    again = run_comparison(
        build_experiment({**QUICK, "strategies": ["fbn", "gn"], "seeds": 3}),
        folder=tmp_path,
        monitor=Monitor([lambda e: rounds.append((e.strategy, e.seed, e.round))]),
    )
    assert again.runs[:2] == first.runs
    trained = {(s, seed) for s, seed, r in rounds if r < 4}
    assert trained == {("fbn", 2), ("gn", 0), ("gn", 1), ("gn", 2)}


def test_a_folder_with_another_experiment_is_refused(tmp_path):
    run_comparison(build_experiment({**QUICK, "strategies": ["fbn"], "seeds": 1}), folder=tmp_path)
    with pytest.raises(ConfigError, match=r"other values of batch_size, clients; .*--fresh"):
        run_comparison(
            build_experiment({**QUICK, "strategies": ["fbn"], "clients": 4, "batch_size": 9}),
            folder=tmp_path,
        )


@pytest.mark.slow
@pytest.mark.parametrize(("held", "expected"), [(10**9, 4), (0, 6)])
def test_a_run_is_prepared_once_while_memory_is_held_for_it(held, expected, monkeypatch):
    made = []

    def counted(experiment, entry, seed, *args):
        made.append((entry.title, seed))
        return prepare(experiment, entry, seed, *args)

    chosen = build_experiment({**QUICK, "strategies": ["fbn", "fedbn"], "seeds": 2})
    plain = run_comparison(chosen)
    monkeypatch.setattr(comparison, "prepare", counted)
    monkeypatch.setattr(job, "prepare", counted)
    monkeypatch.setattr(comparison, "_HELD", held)
    again = run_comparison(chosen)
    assert len(made) == expected
    assert set(made) == {(name, seed) for name in ("fbn", "fedbn") for seed in (0, 1)}
    assert [run.history for run in again.runs] == [run.history for run in plain.runs]


def test_the_conversion_is_told_once_for_each_strategy_and_recorded(tmp_path, caplog):
    chosen = build_experiment({**QUICK, "strategies": ["none", "gn"], "seeds": 2})
    with caplog.at_level(logging.INFO, "fednorm.conversion"):
        found = run_comparison(chosen, folder=tmp_path)
    told = [record.getMessage() for record in caplog.records if "→" in record.getMessage()]
    assert [text.partition(":")[0] for text in told] == ["none", "gn"]
    assert all(
        run.conversion and f"{run.strategy}: {'; '.join(run.conversion)}" in told
        for run in found.runs
    )
    assert run_comparison(chosen, folder=tmp_path).runs == found.runs  # as read from disk
    assert found.to_json()["runs"][0]["conversion"] == found.runs[0].conversion


def test_a_damaged_record_is_made_again(tmp_path):
    experiment = build_experiment({**QUICK, "strategies": ["fbn"], "seeds": 1})
    first = run_comparison(experiment, folder=tmp_path)
    (tmp_path / "runs" / "fbn-seed0" / "run.json").write_text('{"key": ')
    again = run_comparison(experiment, folder=tmp_path)
    assert again.runs[0].history == first.runs[0].history


@pytest.mark.parametrize("strategy", ["fedbn", "silobn"])
def test_personal_strategies_report_every_client(strategy):
    run = fednorm.simulate(strategy, **_one())
    assert run.personal
    assert len(run.final.per_client) == 3
    assert run.final.accuracy == pytest.approx(sum(run.final.per_client) / 3)
    assert run.final.worst == min(run.final.per_client)
    assert 0 <= run.final.weighted <= 1
    record = run.to_json()["final"]
    assert {"accuracy", "loss", "per_client", "worst", "weighted"} <= set(record)


def _one():
    return {key: value for key, value in QUICK.items() if key != "seeds"}


def test_a_global_model_is_tested_on_client_splits_if_asked():
    plain = fednorm.simulate("fbn", **_one())
    asked = fednorm.simulate("fbn", evaluate="clients", **_one())
    assert plain.final.per_client is None
    assert len(asked.final.per_client) == 3
    assert asked.final.accuracy == plain.final.accuracy
    assert asked.final.weighted == pytest.approx(plain.final.accuracy)


def test_a_loss_that_is_not_finite_stops_that_run_only(tmp_path):
    found = fednorm.compare(
        [{"name": "none", "label": "wild"}, "fbn"],
        algorithm={"name": "fedavg", "lr": 1e30},
        local_steps=3,
        out=tmp_path,
        **QUICK,
    )
    wild = found.runs[0]
    assert wild.status == "diverged"
    assert "round" in wild.error
    assert "client" in wild.error
    assert len(found.runs) == 4
    assert json.loads((tmp_path / "runs/wild-seed0/run.json").read_text())


def test_a_run_that_diverges_with_frozen_statistics_says_what_to_try():
    """Stage I of `fixbn` has batch statistics: what helps in stage II is no advice there."""
    wild = {"algorithm": {"name": "fedavg", "lr": 1e30}, "local_steps": 3, **_one()}
    frozen = fednorm.simulate({"name": "fixbn", "freeze_round": 0}, **wild)
    assert frozen.status == "diverged"
    assert frozen.error.endswith('when they freeze (algorithm.schedule = "step").')
    for name in ("fbn", "dualbn"):
        fixed = fednorm.simulate(name, **wild)
        assert fixed.status == "diverged"
        assert "choose a smaller one, or 'alignbn'" in fixed.error
        assert "algorithm.clip_norm = 1" in fixed.error
    fresh = fednorm.simulate("none", **wild)
    assert fresh.error.endswith(NonFiniteLossError.REMEDY)


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_a_run_that_diverges_says_which_switch_to_try(name):
    """Whether it is the loss that is not finite, or what the clients send."""
    model = {"name": "resnet", "widths": [4, 6]}
    wild = {"algorithm": {"name": "fedavg", "lr": 1e30}, "local_steps": 3, "model": model}
    found = fednorm.simulate(name, **{**_one(), **wild})
    assert found.status == "diverged"
    assert re.search(r"algorithm\.(clip_norm|schedule)", found.error)


def test_an_interruption_keeps_finished_runs_and_the_next_call_resumes(tmp_path):
    experiment = build_experiment({**QUICK, "strategies": ["fbn", "gn"]})

    def interrupt(event):
        if (event.strategy, event.seed, event.round) == ("fbn", 1, 3):
            raise KeyboardInterrupt

    cut = run_comparison(experiment, folder=tmp_path, monitor=Monitor([interrupt]))
    assert [(r.seed, r.status) for r in cut.runs] == [(0, "finished"), (1, "interrupted")]
    assert cut.runs[1].rounds == 3
    assert [e.round for e in cut.runs[1].history] == [2]
    assert len(rows(tmp_path, "fbn-seed1")) == 3
    whole = run_comparison(experiment, folder=tmp_path)
    assert [r.status for r in whole.runs] == ["finished"] * 4
    assert whole.runs[0] == cut.runs[0]


@pytest.mark.slow
def test_worker_processes_give_the_same_bits(tmp_path):
    experiment = build_experiment({**QUICK, "strategies": ["fbn", "fedbn"]})
    events = []
    alone = run_comparison(experiment)
    together = run_comparison(
        experiment, folder=tmp_path, workers=2, monitor=Monitor([events.append])
    )
    assert [r.history for r in together.runs] == [r.history for r in alone.runs]
    assert len(events) == 16


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_statistics_that_overflow_stop_that_run_only(workers):
    """The loss is finite still, but no reply can be used."""
    overflow = {"name": "fedavg", "lr": 1e19}
    found = run_comparison(
        build_experiment(
            {**QUICK, "strategies": ["fbn", "gn"], "algorithm": overflow, "rounds": 30}
        ),
        workers=workers,
    )
    assert len(found.runs) == 4
    assert {r.status for r in found.runs if r.strategy == "fbn"} == {"diverged"}


@pytest.mark.slow
def test_an_error_in_a_worker_is_raised_and_nothing_hangs(tmp_path, monkeypatch):
    """Workers that still have much to report must not wait for a parent that has given up."""
    (tmp_path / "strange.py").write_text(
        "import os\n"
        "from torch import nn\n"
        "class Strange(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
        "        self.calls = 0\n"
        "    def forward(self, x):\n"
        "        self.calls += 1\n"
        "        if self.calls > 40 and not os.path.exists('raised'):\n"
        "            open('raised', 'a').close()\n"
        "            raise OSError('strange')\n"
        "        return self.net(x)\n"
        "def net():\n"
        "    return Strange()\n"
    )
    monkeypatch.chdir(tmp_path)
    experiment = build_experiment(
        {"strategies": ["none"], "model": "strange:net", "rounds": 3000, "seeds": 4, "clients": 2}
    )
    with pytest.raises(OSError, match="strange"):
        run_comparison(experiment, workers=2)


@pytest.mark.slow
def test_a_model_object_goes_to_other_processes(tmp_path):
    settings = {"rounds": 2, "clients": 3, "seeds": 2, "model": make_flat}
    alone = fednorm.compare(["fbn"], **settings)
    apart = fednorm.compare(["fbn"], workers=2, out=tmp_path, **settings)
    assert [run.final for run in apart.runs] == [run.final for run in alone.runs]
    assert apart.config["model"] == alone.config["model"]
    assert type(apart.runs[1].model()[2]) is nn.BatchNorm1d


def test_a_model_that_cannot_go_to_other_processes_is_refused():
    with pytest.raises(ConfigError, match=r"model '.*Sequential' cannot be sent to other proc"):
        fednorm.compare(["fbn"], model=lambda: make_flat(), workers=2)  # noqa: PLW0108


def make_flat():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


def test_a_model_factory_gets_a_new_model_for_each_run():
    made = []

    def factory():
        made.append(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
        return made[-1]

    found = fednorm.compare(["none"], model=factory, **QUICK)
    assert len(made) >= 2
    assert all(r.status == "finished" for r in found.runs)


@pytest.mark.slow
def test_every_strategy_runs_by_its_name():
    names = [*fednorm.list_strategies(), "centralized", "centralized:gn"]
    found = fednorm.compare(
        names, model={"name": "resnet", "widths": [4, 4]}, rounds=2, seeds=1, clients=2
    )
    assert [r.status for r in found.runs] == ["finished"] * len(names)
    exchanges = {r.strategy: r.exchanges_per_round for r in found.runs}
    assert exchanges.pop("fedtan") == 3 * 6 + 1
    assert set(exchanges.values()) == {0, 1}


def small(width=8):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width), nn.Linear(width, 10)
    )


def test_a_folder_never_answers_for_another_model(tmp_path):
    first = fednorm.compare(["fbn"], model=small(), out=tmp_path, **QUICK)
    stamp = (tmp_path / "runs/fbn-seed0/run.json").stat().st_mtime_ns
    again = fednorm.compare(["fbn"], model=small(), out=tmp_path, **QUICK)
    assert [run.final for run in again.runs] == [run.final for run in first.runs]
    assert (tmp_path / "runs/fbn-seed0/run.json").stat().st_mtime_ns == stamp
    assert again.config["model"]["name"] == "object:torch.nn.modules.container.Sequential"
    x = torch.rand(2, 1, 8, 8)
    assert torch.equal(first.runs[0].model()(x), again.runs[0].model()(x))
    other = small()
    with torch.no_grad():
        other[1].weight[0, 0] += 1
    for changed in (other, small(12)):
        with pytest.raises(ConfigError, match="other values of model"):
            fednorm.compare(["fbn"], model=changed, out=tmp_path, **QUICK)
    assert (tmp_path / "runs/fbn-seed0/run.json").stat().st_mtime_ns == stamp


def test_a_model_function_is_seeded_like_a_named_model():
    def make():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    state = torch.get_rng_state()
    first, again = (fednorm.compare(["none"], model=make, **QUICK) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert [r.final.loss for r in first.runs] == [r.final.loss for r in again.runs]
    assert first.runs[0].final.loss != first.runs[1].final.loss  # two seeds


def test_a_config_cannot_make_a_model_object():
    described = fednorm.compare(["fbn"], model=small(), **QUICK).config
    with pytest.raises(ConfigError, match="was given as an object in Python"):
        run_comparison(build_experiment(described))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [2, 1])
def test_a_script_without_a_guard_gets_a_sentence(tmp_path, seeds):
    script = tmp_path / "unguarded.py"
    script.write_text(
        f"import fednorm\nfednorm.compare(['fbn'], rounds=2, clients=4, seeds={seeds}, workers=2, "
        "engine='processes' if {seeds} == 1 else 'auto')\n".replace("{seeds}", str(seeds))
    )
    found = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, timeout=100
    )
    assert found.returncode == 1
    (line,) = found.stderr.splitlines()
    assert line.endswith('if __name__ == "__main__": (or use workers=1).')


def test_the_users_model_is_not_cast():
    model = small()
    fednorm.simulate("fbn", model=model, dtype="float64", rounds=3, clients=3)
    assert model[1].weight.dtype is torch.float32
