"""The figure on each method's page: its accuracy by round next to `naive` and `centralized`.

    python benchmarks/method_figures.py [--seeds 3] [--out results/method-figures]

Three settings of docs/choose.md on the embedded digits, ten clients with one digit each. Runs that
`--out` holds are not repeated. Writes docs/figures/methods/NAME.svg. About fifteen minutes on two
cores.
"""

import argparse
import sys
import tomllib
from pathlib import Path
from statistics import fmean

from fednorm import compare, list_strategies
from fednorm.errors import FednormError

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "_site"))

from drawing import join_panels  # noqa: E402 (of the documentation's site)

FIGURES = ROOT / "docs" / "figures" / "methods"
PANELS = {  # the file of configs/, rounds, and the title
    "choose-one-step-bn-last": (300, "one step a round, mlp"),
    "choose-one-step-bn-first": (300, "one step a round, resnet"),
    "choose-local-one-class": (40, "local epochs, resnet"),
}
REFERENCES = ("centralized", "naive")
WIDTH, HEIGHT, LEFT, TOP = 200, 120, 30, 24
POINTS = 30  # of a curve, at most


def read_settings(name: str, seeds: int) -> dict:
    """Return the settings of a panel's configuration, without its strategies."""
    settings = tomllib.loads((ROOT / "configs" / f"{name}.toml").read_text(encoding="utf-8"))
    rounds = PANELS[name][0]
    changed = {
        "rounds": rounds, "eval_every": rounds // POINTS or 1, "threads": 1,
        "seeds": list(range(seeds)),
    }  # fmt: skip
    return {key: value for key, value in settings.items() if key != "strategies"} | changed


def run_panel(name: str, seeds: int, out: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the mean accuracy by round of every strategy that the panel's model takes."""
    curves = {}
    for strategy in [*REFERENCES, *(s for s in list_strategies() if s not in REFERENCES)]:
        try:
            found = compare([strategy], out=out / name / strategy, **read_settings(name, seeds))
        except FednormError as error:
            print(f"{name}, {strategy}: {error}")
            continue
        if any(run.status != "finished" for run in found.runs):
            print(f"{name}, {strategy}: {[run.status for run in found.runs]}")
        histories = [[(e.round, e.accuracy) for e in run.history] for run in found.runs]
        curves[strategy] = [
            (points[0][0], fmean(accuracy for _, accuracy in points))
            for points in zip(*histories, strict=False)
        ]
        print(f"{name}, {strategy}: {curves[strategy][-1]}", flush=True)
    return curves


def draw_curve(points: list[tuple[int, float]], rounds: int, css: str) -> str:
    """Return one line of a panel."""
    places = " ".join(
        f"{LEFT + WIDTH * number / rounds:.1f},{TOP + HEIGHT * (1 - value):.1f}"
        for number, value in points
    )
    return f'<polyline class="{css}" points="{places}"/>'


def draw_panel(name: str, title: str, rounds: int, curves: dict[str, list]) -> str:
    """Return the frame, the grid, the lines and the legend of one panel."""
    parts = [f'<text class="title" x="{LEFT}" y="{TOP - 9}">{title}</text>']
    for share in (0, 50, 100):
        y = TOP + HEIGHT * (1 - share / 100)
        parts.append(f'<path class="grid" d="M{LEFT} {y:g}h{WIDTH}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 4}" y="{y + 3:g}" text-anchor="end">{share}</text>'
        )
    parts.append(
        f'<text class="tick" x="{LEFT + WIDTH}" y="{TOP + HEIGHT + 13}" text-anchor="end">'
        f"{rounds} rounds</text>"
    )
    shown = [*REFERENCES, *({name} - set(REFERENCES))] if name in curves else []
    for place, entry in enumerate(shown):
        css = entry if entry in REFERENCES else "method"
        parts.append(draw_curve(curves[entry], rounds, css))
        x, y = LEFT + 72 * place, TOP + HEIGHT + 30
        parts.append(f'<path class="{css}" d="M{x} {y - 3}h14"/>')
        parts.append(f'<text class="tick" x="{x + 18}" y="{y}">{entry}</text>')
    if not shown:
        parts.append(
            f'<text class="tick" x="{LEFT + WIDTH / 2:g}" y="{TOP + HEIGHT / 2 - 6:g}" '
            'text-anchor="middle">does not run on this model</text>'
        )
    return "\n".join(parts)


def draw_figure(name: str, panels: dict[str, dict[str, list]]) -> str:
    """Return the figure of a strategy as SVG."""
    drawn = [
        draw_panel(name, title, rounds, panels[panel]) for panel, (rounds, title) in PANELS.items()
    ]
    label = f"Accuracy in % by round: {name} next to centralized and naive"
    return join_panels(drawn, LEFT + WIDTH + 10, TOP + HEIGHT + 38, label)


def main() -> None:
    """Run what is missing and write all figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/method-figures"))
    asked = parser.parse_args()
    panels = {name: run_panel(name, asked.seeds, asked.out) for name in PANELS}
    FIGURES.mkdir(parents=True, exist_ok=True)
    for name in list_strategies():
        (FIGURES / f"{name}.svg").write_text(draw_figure(name, panels), encoding="utf-8")


if __name__ == "__main__":
    main()
