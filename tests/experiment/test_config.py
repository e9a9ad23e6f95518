"""Bad input gets a clear error before any training."""

import pytest
from torch import nn

import fednorm
from fednorm.errors import ConfigError
from fednorm.experiment.comparison import run_comparison
from fednorm.experiment.run import Monitor
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.schema.load import build_experiment, override_settings, read_toml, to_toml

BAD = [
    ({"strategies": ["fnb"]}, "unknown strategy 'fnb'; did you mean 'fbn'"),
    ({"partition": "gama=0"}, "unknown partition 'gama'; did you mean 'gamma'"),
    ({"model": "mpl"}, "unknown model 'mpl'; did you mean 'mlp'"),
    ({"data": "digit"}, "unknown data set 'digit'; did you mean 'digits'"),
    ({"algorithm": "fedvg"}, "unknown algorithm 'fedvg'; did you mean 'fedavg'"),
    ({"roundz": 3}, "unknown key 'roundz'; did you mean 'rounds'"),
    (
        {"strategies": [{"name": "fbn", "stats_momentm": 0.1}]},
        "'stats_momentm'; did you mean 'stats_momentum'",
    ),
    ({"algorithm": {"name": "dsgd", "rl": 0.1}}, "unknown field of algorithm 'dsgd' 'rl'"),
    ({"strategy": {"groupz": 2}}, "unknown field of the chosen strategies 'groupz'"),
    ({"clients": 5000}, "cannot give each of 5000 clients a sample"),
    ({"clients": 0}, "clients = 0 is not valid"),
    ({"partition": "gamma=1.5"}, "gamma"),
    ({"partition": "gamma=-0.1"}, "gamma"),
    ({"partition": "dirichlet=0"}, "alpha above 0"),
    ({"partition": "dirichlet_unbalanced=-1"}, "alpha above 0"),
    ({"partition": "gamma=much"}, "needs a number for gamma"),
    ({"partition": "natural"}, "natural"),
    ({"batch_size": 1}, "naive: client 0 .* batch of 1 sample"),
    ({"batch_size": 0}, "batch_size = 0 is not valid"),
    ({"strategies": [{"name": "gn", "groups": 3}]}, "128 channels, which 3 groups do not divide"),
    ({"strategies": ["in"]}, "one value per group"),
    ({"strategies": ["fbn", "fbn"]}, "'fbn' is listed twice"),
    ({"strategies": []}, "strategies"),
    ({"strategies": ["centralized:fedbn"]}, "keeps tensors on its clients"),
    ({"strategies": ["fixbn"], "strategy": {"freeze_round": 2.5}}, "freeze_round must be"),
    ({"algorithm": {"name": "dsgd", "lr": "fast"}}, "lr = 'fast' is not valid"),
    ({"local_steps": 3}, "takes one step per round"),
    ({"algorithm": "fedavg", "local_steps": 2, "local_epochs": 2}, "either steps or epochs"),
    ({"participation": 0}, "participation = 0 is not valid"),
    ({"device": "abacus"}, "device is 'auto', .* not 'abacus'"),
    ({"data": "ring", "model": "cnn"}, "needs images of shape"),
    ({"model": "nowhere.at:all"}, "nowhere"),
    ({"data": {"name": "digits", "test": 5000}}, "test"),
    ({"dtype": "int8"}, "dtype = 'int8' is not valid"),
    ({"evaluate": "local"}, "evaluate = 'local' is not valid: .*'auto', 'global' or 'clients'"),
]


@pytest.mark.parametrize(("values", "message"), BAD)
def test_bad_input_is_refused_before_training(values, message):
    def trained(_event):
        pytest.fail("training started")

    with pytest.raises(ConfigError, match=message):
        run_comparison(
            build_experiment({"rounds": 1, "seeds": 1, **values}), monitor=Monitor([trained])
        )


def test_a_strategy_that_needs_batch_norm_on_a_model_without_it():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(ConfigError, match="FBN needs BatchNorm layers, but Sequential has none"):
        fednorm.simulate("fbn", model=model, rounds=1)
    assert fednorm.simulate("none", model=model, rounds=1).status == "finished"


def test_a_model_that_does_not_fit_the_data():
    with pytest.raises(ConfigError, match=r"cannot be trained on samples of shape \(1, 8, 8\)"):
        fednorm.simulate("none", model=nn.Linear(3, 10), rounds=1)


def test_the_defaults_are_the_demonstration():
    demo = Experiment()
    assert [e.title for e in demo.strategies] == ["centralized", "naive", "fixbn", "fbn", "gn"]
    assert (demo.clients, demo.rounds, demo.batch_size, demo.partition) == (10, 600, 20, "gamma=0")
    assert demo.seeds == [0, 1, 2]


def test_the_resolved_config_can_be_run_again(tmp_path):
    text = {
        "strategies": ["fbn", {"name": "fixbn", "freeze_round": "auto", "label": "auto"}],
        "algorithm": {"name": "fedavg", "lr": 0.1, "momentum_state": "local"},
        "strategy": {"stats_momentum": "none"},
        "local_epochs": 2,
        "seeds": [3, 5],
    }
    experiment = build_experiment(text)
    path = tmp_path / "config.toml"
    path.write_text(to_toml(experiment))
    assert build_experiment(read_toml(path)) == experiment
    assert experiment.make_strategy(experiment.strategies[0]).stats_momentum is None


def test_fields_for_all_strategies_reach_those_that_have_them():
    experiment = build_experiment({"strategy": {"stats_momentum": 0.3, "groups": 4}})
    made = {e.title: experiment.make_strategy(e) for e in experiment.strategies}
    assert made["fbn"].stats_momentum == made["naive"].stats_momentum == 0.3
    assert made["gn"].groups == 4


def test_overrides():
    values = override_settings(
        {"rounds": 5}, ["rounds=7", "algorithm.lr=0.5", "strategy.stats_momentum=none"]
    )
    experiment = build_experiment(values)
    assert experiment.rounds == 7
    assert experiment.make_algorithm().lr == 0.5
    assert experiment.make_algorithm().momentum == 0.9
    with pytest.raises(ConfigError, match="key=value"):
        override_settings({}, ["rounds"])


def test_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match="there is no file"):
        read_toml(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("rounds = [")
    with pytest.raises(ConfigError, match="cannot be read as TOML"):
        read_toml(tmp_path / "broken.toml")


def test_seeds_are_a_number_or_a_list():
    assert build_experiment({"seeds": 2}).seeds == [0, 1]
    assert build_experiment({"seeds": "2"}).seeds == [0, 1]
    assert build_experiment({"seeds": "7,9"}).seeds == [7, 9]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"aggregator": "centered_clipping(radius=much)"}, "aggregator 'centered_clipping' with"),
        ({"engine": ["loop"]}, "engine = \\['loop'\\] is not valid"),
        ({"seeds": "many"}, "seeds are a number or a list such as 0,7, not 'many'"),
        ({"data": 5}, "5 is not a name, nor a table with a name and fields"),
        ({"data": {"test": 5}}, "{'test': 5} needs a name"),
        ({"strategies": [{"name": "fbn", "byzantine": "x"}]}, "byzantine = 'x' is not valid"),
        ({"strategies": [{"name": "fbn", "min_replies": 0}]}, "min_replies = 0 is not valid"),
    ],
)
def test_a_value_of_a_wrong_type_is_a_config_error(values, message):
    with pytest.raises(ConfigError, match=message):
        build_experiment(values)


def test_texts_are_parsed_once():
    entries = ["naive", {"name": "fbn", "byzantine": 2, "statistics_aggregator": "median"}]
    experiment = build_experiment({"strategies": entries, "strategy": {"stats_momentum": 0.3}})
    plain, robust = experiment.strategies
    assert experiment.for_entry(plain) is experiment
    variant = experiment.for_entry(robust)
    assert experiment.for_entry(robust) is variant
    assert variant.for_entry(variant.strategies[0]) is variant
    assert variant.partition_rule is variant.partition_rule
    assert variant.make_algorithm() is variant.make_algorithm()
    assert variant.make_strategy(robust) == experiment.make_strategy(robust)
    assert experiment.aggregators is experiment.aggregators
    assert variant.aggregators != experiment.aggregators
    assert (variant.byzantine, experiment.byzantine) == (2, 0)
    assert build_experiment(variant.model_dump()) == variant


def test_labels_that_would_share_a_folder_are_refused():
    entries = [{"name": "fbn", "label": label} for label in ("a/b", "A b")]
    with pytest.raises(ConfigError, match="give each its own label"):
        build_experiment({"strategies": entries})


@pytest.mark.parametrize("seeds", [[0, 0], [-1, 2]])
def test_seeds_are_different_and_not_negative(seeds):
    with pytest.raises(ConfigError, match="seeds must be different and not negative"):
        build_experiment({"seeds": seeds})


def test_a_value_in_place_of_a_table_gets_a_message():
    with pytest.raises(ConfigError, match="rounds is not a table"):
        override_settings({"rounds": 5}, ["rounds.x=3"])
    with pytest.raises(ConfigError, match="unknown field of the chosen strategies 'name'"):
        build_experiment({"strategy": {"name": "fbn"}})
