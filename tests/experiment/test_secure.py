"""`secure = true` as users meet it: the same accuracy, one reply at the server, and refusals."""

import logging

import pytest
import torch

import fednorm
from fednorm.attacks import list_attacks
from fednorm.engines import loop
from fednorm.errors import ConfigError
from fednorm.experiment.prepare import prepare
from fednorm.experiment.schema.load import build_experiment
from fednorm.strategies import STRATEGIES

SMALL = {"clients": 5, "rounds": 3, "eval_every": 3, "secure": True}
LOCAL = {"algorithm": {"name": "fedavg", "lr": 0.05}, "local_epochs": 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["naive", "fbn", "heterofl", "fedbn"])
def test_a_run_as_users_make_it(name, tmp_path):
    """Unequal clients, some of which take part, local epochs, a test, and the model in a file."""
    common = {
        **SMALL,
        **LOCAL,
        "partition": "dirichlet_unbalanced=0.5",
        "participation": 0.6,
        "rounds": 6,
        "client_dropout": 0.1,
        "min_replies": 2,  # as secure sums need
    }
    secure = fednorm.simulate(name, **common, out=tmp_path)
    plain = fednorm.simulate(name, **{**common, "secure": False})
    assert secure.status == "finished"
    assert (secure.rejected, secure.dropped_out) == (plain.rejected, plain.dropped_out)
    # Counters move by the mean number of steps instead of the largest: statistics differ a little.
    assert secure.final.accuracy == pytest.approx(plain.final.accuracy, abs=0.1)
    assert secure.final.train_loss == pytest.approx(plain.final.train_loss, rel=0.1)
    if name != "fedbn":
        (file,) = tmp_path.glob("runs/*/model.safetensors")
        x = torch.rand(4, 1, 8, 8)
        assert torch.equal(fednorm.load(file.parent)(x), secure.model()(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["naive", "fbn", "gn"])
def test_accuracy_does_not_change(name):
    """Rounding of 2^-31 changes no decision of a run with one step a round."""
    plain, secure = (
        fednorm.simulate(name, rounds=15, secure=secure, engine="loop") for secure in (False, True)
    )
    assert abs(secure.final.accuracy - plain.final.accuracy) <= 1 / 400
    assert secure.final.train_loss == pytest.approx(plain.final.train_loss, rel=1e-4)


def test_the_accuracy_of_a_single_client_is_not_told():
    """One of six clients has not taken part: the mean over such clients would be its own."""
    settings = {**SMALL, **LOCAL, "clients": 6, "participation": 0.9, "rounds": 1, "eval_every": 1}
    plain, secure = (
        fednorm.simulate("fedbn", **{**settings, "secure": secure}).final
        for secure in (False, True)
    )
    assert plain.untrained is not None
    assert secure.untrained is None
    assert secure.per_client is None
    assert secure.accuracy == pytest.approx(plain.accuracy, abs=0.05)


@pytest.mark.parametrize("name", ["naive", "fedbn"])
def test_the_server_sees_one_reply(name, monkeypatch):
    seen = []

    def watch(task, state, replies, **options):
        seen.append(([reply.client for reply in replies], options))
        return merge(task, state, replies, **options)

    merge = loop.server_round
    monkeypatch.setattr(loop, "server_round", watch)
    run = fednorm.simulate(name, **SMALL)
    assert seen == [([-1], {})] * 3
    assert (run.final.per_client, run.final.worst) == (None, None)
    assert run.final.accuracy > 0
    entry = build_experiment({"strategies": [name], "seeds": [0], **SMALL})
    made = prepare(entry, entry.strategies[0], 0)
    assert made.engine.name != "merged"
    for result in made.rounds():
        assert [reply.examples for reply in result.replies] == [5 * 20]
        # 8 bytes for each weight, which are 4 in a plain reply, and 16 for each statistic.
        assert result.bytes_up > 2 * made.sent - 200


def test_reference_and_entries_of_their_own():
    experiment = build_experiment(
        {"strategies": ["centralized", {"name": "gn", "secure": True, "label": "gn, secure"}, "gn"]}
    )
    found = [experiment.for_entry(entry).secure for entry in experiment.strategies]
    assert found == [False, True, False]
    assert not build_experiment({"secure": True}).for_entry(experiment.strategies[0]).secure


def test_what_is_off_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger="fednorm"):
        fednorm.compare(["gn", "none"], **{**SMALL, "rounds": 1}, seeds=2)
    (line,) = (r.message for r in caplog.records if "secure" in r.message)
    assert "off: outlier_factor, limits of claims, and results of single clients" in line


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"aggregator": "median", "byzantine": 1}, "aggregator = 'median', which compares replies"),
        (
            {"statistics_aggregator": "nnm > trimmed_mean", "byzantine": 1},
            "statistics_aggregator = 'nnm > trimmed_mean', which compares replies",
        ),
        ({"strategies": ["fedtan"]}, "server of 'fedtan' .* exchanges of batches' statistics"),
        ({"strategies": ["fbn", "feddna"]}, "server of 'feddna' .* depend on each client's"),
        ({"strategies": [{"name": "fedfn", "base": "feddna"}]}, "server of 'fedfn' .* depend on"),
        ({"rollback": True}, "rollback = true, which looks at single replies"),
        ({"max_examples": 20}, "max_examples = 20, which looks at single replies"),
        ({"diagnose": True}, "diagnose = true, which looks at single replies"),
        ({"privacy": {"clip": 1.0, "noise": 1.0}}, r"a table \[privacy\], as the server clips"),
        ({"evaluate": "clients"}, "evaluate = 'clients', which shows a result of each"),
        ({"attack": "non_finite", "byzantine": 1}, "attack 'non_finite': integers are finite"),
        ({"engine": "flower"}, "engine 'flower', whose secure aggregation"),
        ({"participation": 0.2}, "one client in a round"),
        ({"unseen_clients": 4}, "one client in a round"),
    ],
)
def test_what_needs_single_replies_is_refused_by_name(settings, reason):
    build_experiment({"strategies": ["fbn"], **SMALL, **settings, "secure": False})
    with pytest.raises(
        ConfigError, match=f"does not go with .*{reason}" if "server" not in reason else reason
    ):
        build_experiment({"strategies": ["fbn"], **SMALL, **settings})


def test_all_other_strategies_are_accepted():
    refused = set()
    for name in STRATEGIES:
        try:
            build_experiment({"strategies": [name], **SMALL})
        except ConfigError:
            refused.add(name)
    assert refused == {"fedtan", "feddna"}


def test_merged_batches_are_refused():
    with pytest.raises(ConfigError, match="engine 'merged' needs secure = false"):
        fednorm.simulate("fbn", **SMALL, engine="merged")


@pytest.mark.slow
@pytest.mark.parametrize("attack", sorted(set(list_attacks()) - {"non_finite"}))
def test_attacks_are_summed_like_any_reply(attack):
    run = fednorm.simulate("fbn", **SMALL, attack=attack, byzantine=1)
    assert (run.status, run.rejected) == ("finished", 0)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["stacked", "processes"])
def test_engines_agree(engine):
    one, other = (fednorm.simulate("fbn", **SMALL, **LOCAL, engine=e) for e in ("loop", engine))
    assert other.final.train_loss == pytest.approx(one.final.train_loss, rel=1e-4)
