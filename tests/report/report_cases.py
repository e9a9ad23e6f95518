"""Hand-made comparisons: nothing is trained for the tests of reports."""

from dataclasses import replace
from html.parser import HTMLParser

from fednorm.experiment.results import Comparison, Evaluation, FigureResult, PanelResult, RunResult
from fednorm.report.page import render_page
from fednorm.report.styles import KNOWN
from fednorm.report.write import wrap_comparison

NAN = float("nan")
CONFIG = {
    "rounds": 20,
    "data": {"name": "digits"},
    "model": "mlp",
    "partition": {"name": "dirichlet", "alpha": 0.1},
    "federation": {"clients": 10, "fraction": None},
    "algorithm": {"name": "fedavg"},
    "strategies": ["fbn", {"name": "naive", "pool": True}],
}
ENVIRONMENT = {"fednorm": "0.1.0", "torch": "2.6.0"}


def run(strategy, accuracies, seed=0, **changes):
    """Make a run that is evaluated every 10 rounds."""
    history = tuple(
        Evaluation(10 * number, accuracy, loss=1 - accuracy, train_loss=0.5)
        for number, accuracy in enumerate(accuracies, start=1)
    )
    finished = RunResult(
        strategy=strategy,
        seed=seed,
        status="finished",
        history=history,
        rounds=10 * len(history),
        exchanges_per_round=1.0,
        bytes_up_per_round=44_426.0,
        bytes_down_per_round=1_080_000.0,
        seconds=12.34,
    )
    return replace(finished, **changes)


def diverged(strategy, accuracies=(), seed=0, error="loss is nan"):
    return run(strategy, accuracies, seed, status="diverged", error=error)


def personal(strategy, clients, seed=0):
    mean = sum(clients) / len(clients)
    last = Evaluation(10, mean, 0.4, 0.5, per_client=clients, worst=min(clients), weighted=mean)
    return run(strategy, (), seed, history=(last,), rounds=10, personal=True)


def comparison(*runs, config=CONFIG):
    return Comparison(config, ENVIRONMENT, runs)


def page(result, png=b""):
    """Return the page of a comparison or a figure."""
    figure = result if isinstance(result, FigureResult) else wrap_comparison(result)
    return render_page(figure, png)


def told(*panels, **changes):
    """Make a figure that reproduces something published."""
    figure = FigureResult(
        title="FBN, Figure 3a",
        question="Does it keep up?",
        command="fednorm reproduce fbn-3a",
        panels=panels,
        source="FBN, 2024, arXiv:2405.14670",
        cuts=("A small network.",),
    )
    return replace(figure, **changes)


def two_panels():
    first = comparison(
        run("centralized", (0.5, 0.9)), run("fbn", (0.4, 0.8)), run("naive", (0.3, 0.1))
    )
    second = comparison(
        run("fbn", (0.45, 0.85)),
        run("gn", (0.5, 0.7)),
        diverged("naive", (0.2,)),
        config={**CONFIG, "rounds": 30},
    )
    return told(
        PanelResult("γ = 0", first, {"centralized": 91.0, "fbn": 90.0, "naive": 10.0}),
        PanelResult("γ = 0.01", second, {"fbn": 88.0, "gn": 75.5}),
    )


def three_strategies():
    return comparison(
        run("centralized", (0.5, 0.82)),
        run("centralized", (0.5, 0.84), 1),
        run("fbn", (0.4, 0.80)),
        run("fbn", (0.4, 0.82), 1),
        run("naive", (0.2, 0.16)),
        run("naive", (0.2, 0.20), 1),
    )


EDGE_CASES = {
    "usual": three_strategies(),
    "one evaluation": comparison(run("fbn", (0.8,)), run("fbn", (0.7,), 1)),
    "unequal lengths": comparison(run("fbn", (0.8, 0.9)), diverged("fbn", (0.7,), 1)),
    "no evaluation": comparison(diverged("naive")),
    "nothing": Comparison({}, {}),
    "odd labels": comparison(run("$x$ _{", (0.8,)), run("_private", (0.8,)), run("g" * 99, (1,))),
    "many": comparison(*(run(name, (0.8, 0.9)) for name in KNOWN)),
}


class Elements(HTMLParser):
    """Collects opening tags, attributes, and table cells as a browser would read them."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.cells = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag in {"td", "th"}:
            self.cells.append("")

    def handle_data(self, data):
        if self.cells and data.strip():
            self.cells[-1] += data
