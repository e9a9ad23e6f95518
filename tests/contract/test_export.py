"""What is exported is what was tested: the file of every strategy, in the model it is meant for."""

import json
import re
from dataclasses import asdict

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import fednorm
from fednorm.errors import ConversionError
from fednorm.experiment.job import Job, execute_job
from fednorm.experiment.prepare import prepare
from fednorm.experiment.run import UNWATCHED
from fednorm.experiment.schema.load import build_experiment
from fednorm.strategies import STRATEGIES

# As users run it: float32, unequal clients, local steps, some clients a round.
SETTINGS = {
    "data": {"name": "digits", "test": 60},
    "model": {"name": "resnet", "widths": [4, 6]},
    "clients": 4,
    "rounds": 2,
    "local_steps": 2,
    "batch_size": 16,
    "participation": 0.75,
    "partition": "dirichlet_unbalanced=1.0",
    "algorithm": {"name": "fedavg", "lr": 0.05},
}
# The plain model lacks or has other layers, or computes something else with the same tensors.
NEEDS_LOAD = {"gn", "ln", "in", "gn_ws", "none", "fedwon", "fixup", "switchnorm", "fedfn"}
PERSONAL = {"fedbn", "silobn"}
SWITCHES = {"weight_standardization": True, "statistics": "pool"}


def list_variants():
    """Yield every strategy as it is, and with each switch that it has."""
    for name, cls in sorted(STRATEGIES.items()):
        yield pytest.param({"name": name}, id=name)
        for key, value in SWITCHES.items():
            if key in getattr(cls, "__dataclass_fields__", {}):
                yield pytest.param({"name": name, key: value}, id=f"{name} {key}")
    for base in ("dualbn", "gn", "fedbn"):
        yield pytest.param({"name": "fedfn", "base": base}, id=f"fedfn {base}")


def run(entry, folder):
    """Return a run and its result."""
    experiment = build_experiment({**SETTINGS, "strategies": [entry]})
    chosen, seed = experiment.strategies[0], experiment.seeds[0]
    prepared = prepare(experiment, chosen, seed)
    result = execute_job(Job(experiment, chosen, seed, folder), UNWATCHED, prepared=prepared)
    assert result.status == "finished"
    return prepared, result


@torch.no_grad()
def compute(model, prepared):
    """Return the outputs for the test samples, and the accuracy."""
    batches = list(prepared.data.test_batches())
    outputs = torch.cat([model(x) for x, _ in batches])
    right = outputs.argmax(1) == torch.cat([y for _, y in batches])
    return outputs, right.double().mean().item()


def make_plain():
    return fednorm.create_model("resnet", (1, 8, 8), 10, 5, widths=[4, 6])


@pytest.mark.slow
@pytest.mark.parametrize("entry", list(list_variants()))
def test_the_exported_model_is_the_tested_one(entry, tmp_path):
    prepared, result = run(entry, tmp_path)
    folder = tmp_path / "runs" / f"{entry['name']}-seed0"
    saved = load_file(folder / "model.safetensors")
    personal = PERSONAL & {entry["name"], entry.get("base")}
    if entry["name"] in NEEDS_LOAD | PERSONAL:
        with pytest.raises(RuntimeError, match=r"Missing key|Unexpected key"):
            make_plain().load_state_dict(saved)
    for client in range(4) if personal else [None]:
        model = fednorm.load(tmp_path, client=client)
        assert not any(part.training for part in model.modules())
        outputs, accuracy = compute(model, prepared)
        again, _ = compute(result.model(client=client), prepared)
        torch.testing.assert_close(again, outputs, rtol=0, atol=1e-6)
        if not personal:  # the workspace has what was tested last
            tested, _ = compute(prepared.task.model.eval(), prepared)
            torch.testing.assert_close(outputs, tested, rtol=0, atol=1e-6)
            assert accuracy == pytest.approx(result.final.accuracy, abs=1e-9)
        if entry["name"] not in NEEDS_LOAD:
            plain = make_plain().eval()
            plain.load_state_dict(model.state_dict() if personal else saved)
            torch.testing.assert_close(compute(plain, prepared)[0], outputs, rtol=0, atol=1e-6)


class Untracked(nn.Sequential):
    """A model whose BatchNorm layer has the keys of GroupNorm."""

    def __init__(self):
        norm = nn.BatchNorm2d(4, track_running_stats=False)
        super().__init__(nn.Conv2d(1, 4, 3), norm, nn.Flatten(), nn.Linear(144, 10))


@pytest.mark.parametrize("name", ["gn", "ln", "in", "gn_ws", "naive"])
def test_layers_of_another_kind_with_the_same_keys_are_refused(name, tmp_path):
    result = fednorm.simulate(name, **{**SETTINGS, "model": Untracked()}, out=tmp_path)
    x = torch.randn(3, 1, 8, 8)
    expected = result.model()(x)
    assert torch.equal(fednorm.load(tmp_path, Untracked())(x), expected)
    saved, plain = load_file(tmp_path / "runs" / f"{name}-seed0/model.safetensors"), Untracked()
    if name in NEEDS_LOAD:
        with pytest.raises(RuntimeError, match=r"Unexpected key.*use_fednorm_load"):
            plain.load_state_dict(saved)
    else:
        plain.load_state_dict(saved)
        torch.testing.assert_close(plain.eval()(x), expected, rtol=0, atol=1e-6)


def make_bare():
    """Return a model whose BatchNorm layer has no tensors at all."""
    norm = nn.BatchNorm2d(4, affine=False, track_running_stats=False)
    return nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.Flatten(), nn.Linear(144, 10))


@pytest.mark.parametrize("make", [make_plain, Untracked, make_bare])
@pytest.mark.parametrize("entry", list(list_variants()))
def test_the_plain_model_refuses_what_computes_something_else(entry, make):
    """Whatever state a user saves: of the converted model, or of the folded one."""
    fields = {key: value for key, value in entry.items() if key != "name"}
    try:
        converted = fednorm.convert(make(), entry["name"], **fields).eval()
    except ConversionError:  # such as fixup without residual branches
        return
    x = torch.randn(3, 1, 8, 8)
    for state in (converted.state_dict(), fednorm.fold(converted).state_dict()):
        plain = make().eval()
        try:
            plain.load_state_dict(state)
        except RuntimeError as error:
            assert re.search("Missing key|Unexpected key", str(error))  # noqa: PT017 (not all raise)
        else:
            torch.testing.assert_close(plain(x), converted(x), rtol=0, atol=1e-6)
    converted.load_state_dict(converted.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PERSONAL))
def test_every_client_has_the_model_it_was_tested_with(name, tmp_path):
    settings = {**SETTINGS, "evaluate": "global", "participation": 0.5}
    experiment = build_experiment({**settings, "strategies": [name]})
    result = fednorm.simulate(name, **settings, out=tmp_path)
    prepared = prepare(experiment, experiment.strategies[0], 0)
    own = [compute(fednorm.load(tmp_path, client=c), prepared)[1] for c in range(4)]
    assert own == pytest.approx(result.final.per_client, abs=1e-9)
    with pytest.raises(ValueError, match=r"keeps .* on its clients, .* among 0, 1, 2, 3\."):
        fednorm.load(tmp_path)
    with pytest.raises(ValueError, match=r"among 0, 1, 2, 3, not 4\."):
        result.model(client=4)
    for path in tmp_path.glob("runs/*/clients/*"):
        path.unlink()
    with pytest.raises(ValueError, match="not next to the file"):
        fednorm.load(tmp_path, client=1)


def test_the_header_says_how_the_model_was_made(tmp_path):
    run({"name": "fixbn", "freeze_round": 1}, tmp_path)
    with safe_open(tmp_path / "runs/fixbn-seed0/model.safetensors", "pt") as file:
        header = json.loads(file.metadata()["fednorm"])
    assert header["strategy"] == "fixbn"
    assert header["fields"]["freeze_round"] == 1
    assert (header["model"], header["settings"]) == ("resnet", {"widths": [4, 6]})
    assert (header["shape"], header["classes"], header["dtype"]) == ([1, 8, 8], 10, "float32")


class Net(nn.Sequential):
    """A user's model."""

    def __init__(self, width=4):
        norm = nn.BatchNorm2d(width)
        super().__init__(nn.Conv2d(1, width, 3), norm, nn.Flatten(), nn.Linear(36 * width, 10))


def make_net():
    return Net()


@pytest.mark.parametrize("source", [Net(), make_net])
def test_a_model_object_is_passed_again(source, tmp_path):
    settings = {**SETTINGS, "model": source}
    result = fednorm.simulate("dualbn", **settings, out=tmp_path)
    x = torch.randn(3, 1, 8, 8)
    expected = result.model()(x)
    torch.testing.assert_close(fednorm.load(tmp_path, Net())(x), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(fednorm.load(tmp_path, Net)(x), expected, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=r"Net that was made from an object.*load\(…, Net\(…\)\)"):
        fednorm.load(tmp_path)
    with pytest.raises(ValueError, match=r"0\.weight has the shape \(4, .* \(5, 1, 3, 3\)"):
        fednorm.load(tmp_path, Net(5))
    other = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Identity(), nn.Flatten())
    with pytest.raises(ValueError, match=r"Sequential is not the model .* lacks 3\.bias"):
        fednorm.load(tmp_path, other)
    with pytest.raises(
        ValueError, match=r"Linear is not the model .* DualBN needs BatchNorm .* Pass"
    ):
        fednorm.load(tmp_path, nn.Linear(64, 10))
    fresh = Net()
    before = {key: tensor.clone() for key, tensor in fresh.state_dict().items()}
    fednorm.load(tmp_path, fresh)
    assert fresh.training
    assert all(torch.equal(tensor, before[key]) for key, tensor in fresh.state_dict().items())


def test_a_function_that_a_file_names_is_not_called(tmp_path, monkeypatch):
    (tmp_path / "my_nets.py").write_text("from contract.test_export import Net\n")
    monkeypatch.syspath_prepend(tmp_path)
    settings = {**SETTINGS, "model": "my_nets:Net", "out": tmp_path / "out"}
    result = fednorm.simulate("fbn", **settings)
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(fednorm.load(tmp_path / "out", Net())(x), result.model()(x))
    with pytest.raises(ValueError, match=r"made by 'my_nets:Net', .* pass the model again"):
        fednorm.load(tmp_path / "out")


@pytest.mark.slow
def test_a_result_has_its_model_with_and_without_a_folder(tmp_path):
    kept = fednorm.simulate("dualbn", **SETTINGS)
    made = fednorm.simulate("dualbn", **SETTINGS, out=tmp_path)
    found = fednorm.simulate("dualbn", **SETTINGS, out=tmp_path)  # read from the folder
    assert found == made
    assert found.to_json().keys() == kept.to_json().keys()
    assert "_trained" not in json.dumps(found.to_json())
    x = torch.randn(3, 1, 8, 8)
    expected = kept.model()(x)
    for result in (made, found):
        torch.testing.assert_close(result.model()(x), expected, rtol=0, atol=1e-6)
    kept.model().requires_grad_(requires_grad=False).fc = None  # a copy
    assert torch.equal(kept.model()(x), expected)
    with pytest.raises(ValueError, match="one model for all; leave client=0 out"):
        kept.model(client=0)


def test_a_run_without_a_model_says_why():
    settings = {**SETTINGS, "algorithm": {"name": "fedavg", "lr": 1e30}}
    diverged = fednorm.simulate("naive", **settings)
    with pytest.raises(ValueError, match="has diverged, so it has no trained model"):
        diverged.model()
    kept = fednorm.simulate("gn", **SETTINGS)
    with pytest.raises(ValueError, match=r"not kept.*out=FOLDER"):
        type(kept).from_json(asdict(kept)).model()


@pytest.mark.slow
def test_results_of_other_processes_have_their_models(tmp_path):
    runs = fednorm.compare(["fbn", "gn"], **SETTINGS, seeds=[0], workers=2, out=tmp_path).runs
    x = torch.randn(3, 1, 8, 8)
    for result in runs:
        found = fednorm.load(tmp_path / "runs" / f"{result.strategy}-seed0")
        assert torch.equal(result.model()(x), found(x))
    with pytest.raises(ValueError, match=r"holds 2 runs; choose one of .*fbn-seed0', .*gn-seed0'"):
        fednorm.load(tmp_path)
    (result, _) = fednorm.compare(["fbn", "gn"], **SETTINGS, seeds=[0], workers=2).runs
    with pytest.raises(ValueError, match=r"another process \(workers > 1\)"):
        result.model()


def test_what_is_no_trained_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no folder or file"):
        fednorm.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no model\.safetensors"):
        fednorm.load(tmp_path)
    torch.save(nn.Linear(2, 2), tmp_path / "pickled.pt")
    with pytest.raises(ValueError, match="not an intact safetensors file"):
        fednorm.load(tmp_path / "pickled.pt")
    save_file(nn.Linear(2, 2).state_dict(), tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="does not say how its model was made"):
        fednorm.load(tmp_path / "other.safetensors")
    save_file(
        nn.Linear(2, 2).state_dict(), tmp_path / "new.safetensors", {"fednorm": '{"strategy": 1}'}
    )
    with pytest.raises(ValueError, match="another version of fednorm"):
        fednorm.load(tmp_path / "new.safetensors")
