"""The race of `fednorm doctor`: fair, on training data, and never for a loser."""

import json
import math
import shlex
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from fednorm.api import compare
from fednorm.cli import app
from fednorm.data import Dataset, load_dataset
from fednorm.doctor import Budget, examine, read_budget, show
from fednorm.doctor import race as racing
from fednorm.doctor.costs import ExaminedModel
from fednorm.doctor.findings import Caution, Entrant, Mark, Race, average
from fednorm.doctor.recommend import judge, write_commands
from fednorm.errors import ConfigError
from fednorm.experiment import comparison
from fednorm.experiment.run import UNWATCHED, Monitor, run
from fednorm.experiment.schema.load import build_experiment, read_toml

TINY = {"model": {"name": "mlp", "hidden": [8]}, "clients": 3, "partition": "gamma=0"}
ROUNDS = 8
SHORT = Budget(rounds=ROUNDS)
NAMES = ("naive", "heterofl", "fbn", "gn", "fedbn")
CANDIDATES = (*NAMES, "gn_ws", "dualbn")
EVERYONE = racing.CANDIDATES


def examine_tiny(budget=None, **settings):
    settings = {**TINY, "rounds": 16, **settings}
    return examine(settings.pop("model"), batches=1, budget=budget or SHORT, **settings)


def hold_race(budget=None, monitor=UNWATCHED, **settings):
    """Race without the examination, which takes longer."""
    experiment = build_experiment({**TINY, "rounds": 16, **settings})
    return racing.race(ExaminedModel(None, experiment), budget or SHORT, monitor)


@pytest.fixture(autouse=True)
def _few_candidates(monkeypatch):
    monkeypatch.setattr(racing, "CANDIDATES", CANDIDATES)


@pytest.fixture(scope="module")
def raced():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(racing, "CANDIDATES", CANDIDATES)
        return examine_tiny(participation=0.7)


def make_track(length=ROUNDS, **settings):
    experiment = build_experiment({**TINY, "rounds": 16, **settings})
    clock = racing.Clock(math.inf)
    return racing.Track(ExaminedModel(None, experiment), length, 0, clock, UNWATCHED)


def make_entrant(strategy, accuracy, rounds=40, **changes):
    marks = tuple(Mark(r, accuracy, accuracy) for r in range(1, rounds + 1))
    personal = strategy == "fedbn"
    made = Entrant(strategy, {"name": strategy}, 0.05, personal, rounds=rounds, tested=400)
    return replace(made, marks=marks, **changes)


def make_race(*entrants, wanted=40):
    return Race(40, wanted, 60.0, None, "finished", tuple(entrants))


def print_page(report):
    console = Console(width=80, no_color=True)
    with console.capture() as captured:
        console.print(show(report))
    return captured.get()


@pytest.mark.parametrize(
    ("text", "seconds", "rounds"),
    [("60s", 60, None), ("90", 90, None), ("2m", 120, None), ("1.5h", 5400, None), ("0", 0, None)],
)
def test_budgets_are_read(text, seconds, rounds):
    assert read_budget(text) == Budget(seconds, rounds)
    assert read_budget("40r").rounds == 40


@pytest.mark.parametrize("text", ["", "m", "-1s", "5d", "1.5r", "nan", "inf"])
def test_other_budgets_are_refused(text):
    with pytest.raises(ConfigError, match="a budget is a time"):
        read_budget(text)


def test_validation_samples_are_training_samples_that_nobody_trains_on():
    whole, held = load_dataset("digits", 0), comparison.hold_out({"name": "digits"}, 0)

    def rows(x):
        return sorted(map(tuple, x.flatten(1).tolist()))

    assert rows(torch.cat([held.x, held.x_test])) == rows(whole.x)
    assert len(held.y_test) == pytest.approx(len(whole.y) / 5, abs=1)
    share = torch.bincount(held.y_test) / torch.bincount(whole.y)
    assert share.min() > 0.17
    assert share.max() < 0.23
    again = comparison.hold_out({"name": "digits"}, 0)
    assert torch.equal(held.x_test, again.x_test)


def test_no_natural_group_loses_its_only_sample(monkeypatch):
    x, y = torch.randn(60, 2), torch.zeros(60, dtype=torch.int64)
    groups = np.array([*range(30), *([30] * 30)])  # thirty writers of one sample
    whole = Dataset("own", x, y, x, y, 1, groups=groups, groups_test=groups)
    monkeypatch.setattr(comparison, "load_dataset", lambda *_, **__: whole)
    held = comparison.hold_out({"name": "own"}, 0)
    assert set(held.groups) == set(groups)
    assert set(held.groups_test) == {30}


def test_large_data_on_disk_are_thinned(monkeypatch):
    whole = replace(load_dataset("digits", 0), on_disk=True)
    monkeypatch.setattr(comparison, "load_dataset", lambda *_, **__: whole)
    monkeypatch.setattr(comparison, "LARGEST", whole.x.nbytes / 4)
    held = comparison.hold_out({"name": "digits"}, 0)
    assert len(held.y) + len(held.y_test) == pytest.approx(len(whole.y) / 4, abs=1)
    assert not held.on_disk


@pytest.mark.slow
def test_the_race_is_fair(raced):
    entrants = raced.race.entrants
    assert [e.lr for e in entrants if e.strategy == "naive"] == [0.05, 0.015, 0.15]
    racers = [e for e in entrants if e.status == "racing"]
    assert {e.rounds for e in racers} == {ROUNDS}
    assert {e.rounds for e in entrants if e.status == "dropped"} <= {ROUNDS // 4, ROUNDS // 2}
    assert len({e.tested for e in entrants if e.marks}) == 1
    (naive,) = [e for e in racers if e.strategy == "naive"]
    assert {e.strategy for e in racers if e.personal} == {"fedbn"}
    assert {e.lr for e in racers if e.personal} == {naive.lr}
    at_first = {e.strategy: e for e in entrants if e.lr == 0.05 and e.status == "refused"}
    assert "needs convolutions" in at_first["gn_ws"].note


@pytest.mark.slow
def test_a_run_that_was_paused_is_the_run_without_a_pause(raced):
    (naive,) = [e for e in raced.race.entrants if e.strategy == "naive" and e.status == "racing"]
    track = make_track(participation=0.7)
    (start,) = [
        r
        for r in racing.enter_candidates(track.examined.experiment)
        if r.entrant.strategy == "naive" and r.entrant.lr == naive.lr
    ]
    whole = run(track.prepare(start))
    assert [e.accuracy for e in whole.history] == [m.accuracy for m in naive.marks]
    assert whole.tested == naive.tested == len(comparison.hold_out({"name": "digits"}, 0).y_test)


def test_the_race_scales_warm_ups_and_keeps_the_setting():
    track = make_track(algorithm={"name": "fedavg", "lr": 0.1}, local_steps=2, rounds=400)
    runners = racing.enter_candidates(track.examined.experiment)
    first = {r.entrant.strategy: r for r in reversed(runners)}
    prepared = track.prepare(first["dualbn"])
    assert prepared.task.algorithm.warmup == 1  # 50 of 400 rounds, in 8
    assert prepared.experiment.plan.steps == 2
    assert prepared.experiment.rounds == ROUNDS


def test_the_users_rate_stays_if_another_is_better_by_chance_only():
    def choose(*scores):
        entrants = [make_entrant("fbn", s, lr=0.01 + i) for i, s in enumerate(scores)]
        (chosen,) = racing._choose_rates([racing.Runner(e, None) for e in entrants], 40)
        return entrants.index(chosen.entrant)

    assert choose(0.90, 0.5, 0.92) == 0
    assert choose(0.70, 0.5, 0.92) == 2
    entrants = [make_entrant("fbn", 0.9, status="diverged"), make_entrant("fbn", 0.2)]
    (chosen,) = racing._choose_rates([racing.Runner(e, None) for e in entrants], 40)
    assert chosen.entrant is entrants[1]


ACCURACY = {"naive": 0.1, "fixbn": 0.95, "a": 0.9, "b": 0.8, "c": 0.7, "d": 0.6, "e": 0.5}


class Rigged:
    """A track on which all have their accuracy at once; fixbn is naive before it freezes."""

    rounds, clock = ROUNDS, racing.Clock(math.inf)

    def advance(self, runner, target):
        if runner.entrant.status != "racing":
            return runner
        name = runner.entrant.strategy
        frozen = target > ROUNDS // 2
        known = ACCURACY["naive" if name == "fixbn" and not frozen else name]
        made = make_entrant(name, known, target, lr=runner.entrant.lr)
        return replace(runner, entrant=made)


def test_naive_stays_and_so_does_what_has_been_naive_so_far():
    start = [racing.Runner(make_entrant(n, 0.0, 0), None) for n in ACCURACY]
    ended = [r.entrant for r in racing.run_stages(Rigged(), start)]
    assert {e.strategy for e in ended if e.status == "racing"} == {
        "naive", "fixbn", "a", "b", "c", "d",
    }  # fmt: skip
    assert judge(make_race(*ended, wanted=ROUNDS)).strategy == "fixbn"


def test_the_table_of_candidates(monkeypatch):
    monkeypatch.setattr(racing, "CANDIDATES", EVERYONE)
    one = {r.entrant.strategy for r in racing.enter_candidates(build_experiment({}))}
    local = build_experiment({"algorithm": "fedavg", "local_epochs": 1})
    several = {r.entrant.strategy for r in racing.enter_candidates(local)}
    assert one - several == {"fedtan"}
    assert {
        "naive",
        "heterofl",
        "fbn",
        "fixbn",
        "dualbn",
        "alignbn",
        "hbn",
        "gn",
        "gn_ws",
    } < several


@pytest.mark.slow
def test_no_loser_is_recommended():
    rng = np.random.default_rng(0)
    clear = 0
    for _ in range(300):
        entrants = [
            make_entrant(
                name,
                float(rng.random()),
                int(rng.choice([10, 20, 40])),
                status=str(rng.choice(["racing", "racing", "dropped", "diverged"])),
                lr=lr,
            )
            for name in NAMES
            for lr in (0.05, 0.15)
        ]
        advice = judge(make_race(*entrants))
        naives = [e for e in entrants if e.strategy == "naive" and e.status != "diverged"]
        if advice.strategy in {None, "naive"}:
            continue
        clear += 1
        (chosen,) = [e for e in entrants if (e.strategy, e.lr) == (advice.strategy, advice.lr)]
        assert chosen.status == "racing"
        assert not chosen.personal
        assert all(average(chosen, advice.rounds) > average(e, advice.rounds) for e in naives)
        assert advice.accuracy == average(chosen, advice.rounds)
    assert clear > 50


def test_chance_is_no_reason():
    naive = make_entrant("naive", 0.90)
    near = judge(make_race(naive, make_entrant("heterofl", 0.91), make_entrant("fbn", 0.92)))
    assert near.strategy == "naive"
    assert "No clear winner" in " ".join(near.reasons)
    assert "Calibrated before use (heterofl), the same model reached 91.0 %." in near.reasons
    far = judge(make_race(naive, make_entrant("heterofl", 0.97), make_entrant("fbn", 0.975)))
    assert far.strategy == "heterofl"  # the simpler of two that are equal up to chance
    assert 0.02 < far.noise < 0.05
    restless = replace(naive, marks=tuple(Mark(r, 0.4 + r % 2, 0.9) for r in range(1, 41)))
    assert judge(make_race(restless, make_entrant("fbn", 0.97))).strategy == "naive"


def test_a_short_race_shows_only_who_is_fast_at_the_start():
    naive, fast = make_entrant("naive", 0.5), make_entrant("gn", 0.7)
    assert judge(make_race(naive, fast)).strategy == "gn"
    assert judge(make_race(naive, make_entrant("gn", 0.9), wanted=1000)).strategy == "gn"
    assert judge(make_race(naive, make_entrant("gn", 0.9), wanted=2000)).strategy == "naive"
    early = judge(make_race(naive, fast, wanted=1000))
    assert early.strategy == "naive"
    assert "40 of 1000 rounds are too few to tell: give --budget 3m" in early.reasons[1]
    calibrated = make_entrant("heterofl", 0.65)
    assert judge(make_race(naive, fast, calibrated, wanted=1000)).strategy == "heterofl"


def test_without_naive_the_best_is_recommended():
    lost = make_entrant("naive", 0.5, status="diverged")
    advice = judge(make_race(lost, make_entrant("fbn", 0.6), make_entrant("gn", 0.9)))
    assert advice.strategy == "gn"
    assert advice.naive is None
    assert "naive came to no test" in advice.reasons[0]
    assert judge(make_race(lost)).strategy is None


LOCAL_EPOCHS = {
    "model": {"name": "resnet", "widths": [8, 16]},
    "data": {"name": "digits", "test": 1200},
    "algorithm": {"name": "fedavg", "lr": 0.05, "momentum": 0.9},
    "local_epochs": 1,
    "rounds": 30,
}


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["dirichlet=0.3", "gamma=0"])
def test_with_local_epochs_the_advice_does_not_lose(partition, monkeypatch):
    monkeypatch.setattr(racing, "CANDIDATES", ("naive", "heterofl", "fbn", "gn"))
    monkeypatch.setattr(racing, "RATES", (1.0,))
    settings = {**LOCAL_EPOCHS, "partition": partition, "clients": 10}
    advice = judge(hold_race(**settings))
    assert advice.strategy not in {"fbn", "gn"}  # which lose by far
    if advice.strategy != "naive":
        short = {**settings, "rounds": 8, "seeds": [0], "eval_every": 2}
        own, naive = (
            max(e.accuracy for e in r.history[-2:])
            for r in compare([dict(advice.settings), "naive"], **short).runs
        )
        assert own > naive - 0.03


def make_domains(seed):
    """Return digits of four sources that differ in their images and in their sizes."""
    plain = load_dataset("digits", seed)
    changes = [lambda x: x, lambda x: 1 - x, lambda x: x / 4, lambda x: x.mT + 0.5]
    source = np.repeat(np.arange(4), [500, 250, 120, 60])
    x = torch.stack([changes[k](one) for k, one in zip(source, plain.x, strict=False)])
    test = np.arange(len(plain.y_test)) % 4
    x_test = torch.stack([changes[k](one) for k, one in zip(test, plain.x_test, strict=True)])
    y = plain.y[: len(x)]
    return replace(plain, x=x, y=y, x_test=x_test, groups=source, groups_test=test)


@pytest.mark.slow
def test_on_natural_domains_of_unequal_sizes_the_advice_does_not_lose(monkeypatch):
    monkeypatch.setattr(racing, "CANDIDATES", ("naive", "heterofl", "fbn", "fixbn", "silobn"))
    monkeypatch.setattr(racing, "RATES", (1.0,))
    settings = {"data": {"name": f"{__name__}:make_domains"}, "partition": "natural", "clients": 4}
    race = hold_race(**{**LOCAL_EPOCHS, **settings})
    assert all(e.tested == 186 for e in race.entrants)  # a fifth of 930
    scores = {e.strategy: e.score(ROUNDS) or 0.0 for e in race.entrants if e.status == "racing"}
    assert scores["fbn"] < scores["naive"] - 0.2
    assert scores.get("fixbn", 0.0) < scores["naive"]  # it diverges when it freezes
    assert judge(race).strategy in {"naive", "heterofl"}


@pytest.mark.slow
def test_with_one_step_a_round_shared_statistics_win(monkeypatch):
    monkeypatch.setattr(racing, "CANDIDATES", ("naive", "heterofl", "fixbn", "fbn"))
    monkeypatch.setattr(racing, "RATES", (1.0,))
    race = hold_race(Budget(rounds=64), model="mlp", clients=10, rounds=200)
    advice = judge(race)
    assert advice.strategy in {"fixbn", "fbn"}
    assert advice.accuracy - advice.naive > 0.2


def test_a_users_own_module_is_raced_and_left_as_it_was(monkeypatch):
    monkeypatch.setattr(racing, "CANDIDATES", ("naive", "fbn"))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    examined = ExaminedModel(model, build_experiment({**TINY, "rounds": 4}), named=False)
    race = racing.race(examined, Budget(rounds=4), UNWATCHED)
    assert {e.status for e in race.entrants} <= {"racing", "dropped"}
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    advice = judge(race)
    told = write_commands(advice, examined.experiment, named=False)[0]
    assert "--model package.module:function" in told


def test_a_candidate_that_is_made_to_lose_is_not_recommended(monkeypatch):
    ruined = {"name": "fbn", "stats_momentum": 1e-9, "label": "ruined"}
    monkeypatch.setattr(racing, "CANDIDATES", ("naive", ruined))
    race = hold_race(partition="iid")
    assert {e.strategy for e in race.entrants} == {"naive", "ruined"}
    assert judge(race).strategy == "naive"


def test_a_time_that_is_too_short_says_what_is_needed():
    report = examine_tiny(budget=1e-3)
    assert report.race.rounds == 0
    assert report.race.needed > 0
    assert report.recommendation.strategy is None
    assert "give --budget 1m" in report.recommendation.reasons[0]


def test_a_time_is_kept():
    race = hold_race(Budget(1.0), rounds=10**6)
    assert race.rounds >= racing.SHORTEST or race.rounds == 0
    assert race.seconds < 20  # a busy machine may need some time for one round
    assert max((e.rounds for e in race.entrants), default=0) <= race.rounds


@pytest.mark.slow
@pytest.mark.parametrize("by_flag", [True, False])
def test_an_interrupted_race_is_reported(by_flag, raced):
    stop, seen = threading.Event(), []

    def interrupt(event):
        seen.append(event)
        if len(seen) == 5 and by_flag:
            stop.set()
        elif len(seen) == 5:
            raise KeyboardInterrupt

    race = hold_race(monitor=Monitor([interrupt], stop))
    assert race.ended == "interrupted"
    assert sum(e.rounds for e in race.entrants) in {4, 5}
    advice = judge(race)
    assert advice.strategy in {"naive", "heterofl"}
    assert "Interrupted." in print_page(replace(raced, race=race, recommendation=advice))


@pytest.mark.slow
def test_divergence_is_noticed(raced):
    race = hold_race(algorithm={"name": "dsgd", "lr": 1e29})
    found = {e.strategy: e for e in race.entrants}
    assert found["gn"].status == "diverged"
    assert "diverged in round" in print_page(replace(raced, race=race))
    assert judge(race).strategy != "gn"


@pytest.mark.slow
def test_the_page_is_short(raced):
    pages = [print_page(raced)]
    warned = replace(raced, warnings=(*raced.warnings, *[Caution("x", "word " * 30)] * 9))
    pages.append(print_page(warned))
    pages.append(print_page(examine("resnet")))
    for page in pages:
        assert len(page.splitlines()) <= 40, page
        assert max(map(len, page.splitlines())) <= 80
        assert page.startswith("Recommendation: ")
    assert pages[0].index("Race: 8 of 16 rounds,") < pages[0].index("Run it")


@pytest.mark.slow
def test_the_json_has_the_race(raced):
    written = json.loads(raced.to_json(), parse_constant=pytest.fail)["race"]
    assert written["rounds"] == ROUNDS
    assert written["entrants"][0]["strategy"] == "naive"
    assert written["entrants"][0]["marks"][0]["round"] == 1


@pytest.mark.slow
def test_the_commands_run(raced, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, flower = raced.recommendation.commands
    words = shlex.split(command)
    assert words[:2] == ["fednorm", "compare"]
    short = ["--seeds", "1", "--workers", "1", "--set", "rounds=1"]
    result = CliRunner().invoke(app, [*words[1:], *short])
    assert result.exit_code == 0, result.output
    config = build_experiment(read_toml(tmp_path / "results" / "latest" / "config.toml"))
    assert (config.clients, config.participation) == (3, 0.7)
    assert config.model.fields == {"hidden": [8]}
    assert config.algorithm.fields["lr"] == raced.recommendation.lr
    assert f'NormStrategy("{raced.recommendation.strategy}", model=model)' in flower


def test_settings_of_a_candidate_are_in_the_commands(monkeypatch):
    slow = {"name": "fbn", "stats_momentum": 0.05, "label": "slow"}
    monkeypatch.setattr(racing, "CANDIDATES", (slow,))
    experiment = build_experiment({**TINY, "rounds": 16})
    advice = judge(hold_race(Budget(rounds=4)))
    command, flower = write_commands(advice, experiment, named=True)
    told = shlex.split(command)
    tables = '[{ name = "naive" }, { name = "fbn", label = "slow", stats_momentum = 0.05 }]'
    assert f"strategies={tables}" in told
    assert 'fednorm.create_strategy("fbn", stats_momentum=0.05)' in flower


@pytest.mark.slow
def test_the_command_races(tmp_path):
    options = ["--set", "model.hidden=[8]", "--partition", "gamma=0", "--clients", "3"]
    options += ["--algorithm", "fedavg", "--local-steps", "2", "--lr", "0.1", "--rounds", "8"]
    file = tmp_path / "report.json"
    arguments = ["doctor", "mlp", *options, "--budget", "2r", "--json", str(file)]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert "Race: 2 of 8 rounds" in result.output
    written = json.loads(file.read_text())
    assert written["race"]["entrants"][0]["lr"] == 0.1
    assert written["model"]["algorithm"] == {"name": "fedavg", "lr": 0.1, "momentum": 0.9}
