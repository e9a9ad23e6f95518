"""What a client sends, read off its reply: the table of docs/deploy.md."""

from fednorm import ClientState, broadcast, client_round
from fednorm.algorithms import create_algorithm
from fednorm.core.layout import find_kinds
from fednorm.core.round import client_calibration
from fednorm.core.types import Kind
from fednorm.strategies import STRATEGIES
from support import ToyClients, task_of

HEAD = (
    "| strategy | weights | γ, β | of each BatchNorm layer's input | stays on the client |\n"
    "|---|---|---|---|---|"
)
_NAMES = {Kind.WEIGHT: "weights", Kind.AFFINE: "γ, β", Kind.STATISTIC: "running statistics"}
_KEPT = {"hbn": "mixing weights α", "alignbn": "its own running statistics"}


def row(name):
    task, toy = task_of(name, create_algorithm("fedavg", lr=0.05)), ToyClients()
    received = broadcast(task, task.initial_state)
    reply, _ = client_round(task, received, ClientState(), toy.batches(0, 1))
    kind = find_kinds(task.model)
    sent = {kind[key] for key in reply.update}
    cells = ["update" if k in sent else "–" for k in (Kind.WEIGHT, Kind.AFFINE)]
    personal = {kind[key] for key in task.layout.personal}
    kept = ", ".join(text for k, text in _NAMES.items() if k in personal) or "–"
    kept = _KEPT.get(name, kept)
    return f"| `{name}` | {cells[0]} | {cells[1]} | {_statistics(task, reply, toy)} | {kept} |"


def _statistics(task, reply, toy):
    said = []
    if any(report.moments.var.numel() == 0 for report in reply.stats.values()):
        said.append("means of the loss gradient")
    if reply.stats:
        pooled = task.strategy.statistics == "pool"
        when = " of all its data before it trains" if task.strategy.measures else ""
        said.insert(0, f"mean, variance, count{when}" if pooled else "running mean and variance")
    if task.strategy.calibration != "never":
        received = broadcast(task, task.initial_state)
        seen = client_calibration(
            task, received, ClientState(), toy.all_batches(0), task.strategy.calibration_rule()
        )
        assert seen.stats
        said.append("mean, variance, count of all its data before each evaluation")
    if task.strategy.exchanges:
        said.append("batch mean, squared deviation and their gradients, in mid-step")
    return "; ".join(said) or "–"


def table():
    return "\n".join([HEAD, *(row(name) for name in STRATEGIES)])


if __name__ == "__main__":
    print(table())  # noqa: T201
