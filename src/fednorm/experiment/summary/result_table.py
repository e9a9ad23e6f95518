"""Tables of results, from rows of plain numbers: CSV, HTML, LaTeX, pandas.

`Tabular` is what results have in common: they list their runs, and the rest follows here.
"""

import csv
import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypeAlias

from fednorm.errors import ConfigError, MissingPandasError
from fednorm.experiment.summary.significance import (
    SPREADS,
    TESTS,
    USUAL,
    Record,
    Spread,
    TableSpec,
    Test,
    summarize_runs,
)

Rows: TypeAlias = Literal["runs", "rounds", "strategies"]

MISSING = "–"
_LOWEST, _FAR_BELOW = -10.0, "< −1000"  # of an R² that says no more than that it is bad
_SMALLEST = 0.001  # p that is written
_HTML = """\
<table><caption>{{ table.caption }}</caption>
<thead><tr>{% for title in table.titles %}<th>{{ title }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}{% set best = loop.index0 in table.best %}<tr>
{%- for cell in row %}
{%- if best and loop.index <= 2 %}<td><b>{{ cell }}</b></td>{% else %}<td>{{ cell }}</td>{% endif %}
{%- endfor %}</tr>
{% endfor %}</tbody></table>"""


def keep_finite(value: float | None) -> float | None:
    """Return `value`, or None if it is missing or not finite."""
    return value if value is not None and isfinite(value) else None


def format_percent(fraction: float | None) -> str:
    """Write a fraction in per cent, without the sign.

    >>> format_percent(0.7984), format_percent(None), format_percent(float("nan"))
    ('79.8', '–', '–')
    >>> format_percent(-0.25), format_percent(-1e9)  # R² has no lower bound
    ('−25.0', '< −1000')
    """
    value = keep_finite(fraction)
    if value is None or value < _LOWEST:
        return MISSING if value is None else _FAR_BELOW
    return f"{100 * value:.1f}".replace("-", "−")


def format_mean(mean: float | None, spread: float | None, seeds: int) -> str:
    """Write a mean of fractions in per cent; one seed has no spread.

    >>> format_mean(0.7984, 0.004, 3), format_mean(0.7984, 0.0, 1)
    ('79.8 ± 0.4', '79.8')
    """
    with_spread = keep_finite(mean) is not None and keep_finite(spread) is not None and seeds > 1
    written = format_percent(mean)
    with_spread = with_spread and written != _FAR_BELOW
    return f"{written} ± {format_percent(spread)}" if with_spread else written


def format_points(difference: float | None) -> str:
    """Write a difference in points, always with its sign.

    >>> format_points(1.25), format_points(-0.31), format_points(0.02), format_points(None)
    ('+1.2', '−0.3', '0.0', '–')
    """
    value = keep_finite(difference)
    if value is None or value < 100 * _LOWEST:
        return MISSING if value is None else _FAR_BELOW
    text = f"{abs(value):.1f}"
    sign = "−" if value < 0 else "+"
    return text if float(text) == 0 else sign + text


@dataclass(frozen=True)
class ResultTable:
    """A table for readers: titles, cells as text, and a caption that explains the numbers."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str
    best: frozenset[int] = frozenset()  # rows in bold
    apart: int | None = None  # the first row of those that are not compared with the others

    def to_text(self) -> str:
        """Return the table in columns of characters, its caption below."""
        lines = [self.titles, *self.rows]
        first, *others = [max(map(len, column)) for column in zip(*lines, strict=True)]
        written = [
            "  ".join([label.ljust(first), *map(str.rjust, cells, others)])
            for label, *cells in lines
        ]
        return "\n".join([*written, "", self.caption])

    def to_html(self) -> str:
        """Return the table as an HTML element."""
        from jinja2 import Environment  # noqa: PLC0415 (numbers are written without it)

        return Environment(autoescape=True).from_string(_HTML).render(table=self)

    def to_latex(self, label: str = "tab:results") -> str:
        """Return the table as LaTeX, which needs the package booktabs."""
        lines = [" & ".join(map(escape_latex, self.titles)) + r" \\", r"\midrule"]
        for number, row in enumerate(self.rows):
            if number == self.apart and number:
                lines.append(r"\midrule")
            first, second, *others = map(escape_latex, row)
            if number in self.best:
                first, second = (rf"\textbf{{{cell}}}" for cell in (first, second))
            lines.append(" & ".join((first, second, *others)) + r" \\")
        return "\n".join((
            r"% \usepackage{booktabs}",
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{escape_latex(self.caption)}}}",
            rf"\label{{{label}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(self.titles) - 1)}}}",
            r"\toprule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ))  # fmt: skip


_SPECIAL = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", "−": "$-$", "–": "--", "×": r"$\times$", "<": "$<$", ">": "$>$", "|": "$|$",
    "α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$", "δ": r"$\delta$", "Δ": r"$\Delta$",
    "ε": r"$\varepsilon$", "λ": r"$\lambda$", "μ": r"$\mu$", "σ": r"$\sigma$", "τ": r"$\tau$",
    "ρ": r"$\rho$", "η": r"$\eta$", "†": r"$^\dagger$", "≤": r"$\leq$", "≥": r"$\geq$",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
}  # fmt: skip


def escape_latex(text: str) -> str:
    r"""Return text as LaTeX that prints it.

    >>> print(escape_latex("gn_ws & 5 % ± γ"))
    gn\_ws \& 5 \% $\pm$ $\gamma$
    """
    return "".join(_SPECIAL.get(letter, letter) for letter in text)


def make_table(runs: Sequence[Record], spec: TableSpec = USUAL) -> ResultTable:
    """Return the table of runs: a row for each strategy, personal models last."""
    summaries = sorted(summarize_runs(runs, spec), key=lambda row: row["personal"])
    reference = spec.find_reference(runs) if summaries else None
    listed = list(_list_columns(runs, summaries, reference))
    ranked = [
        (row["accuracy"], number)
        for number, row in enumerate(summaries)
        if row["accuracy"] is not None and not row["personal"] and not _is_reference(row)
        if row["diverged"] < row["runs"]
    ]
    uniform = len({run["setting"] for run in runs}) <= 1
    best = {number for value, number in ranked if value == max(ranked)[0]}
    personal = [number for number, row in enumerate(summaries) if row["personal"]]
    return ResultTable(
        titles=tuple(title for title, _ in listed),
        rows=tuple(zip(*(cells for _, cells in listed), strict=True)),
        caption=_write_caption(runs, summaries, spec, reference),
        best=frozenset(best if len(ranked) > 1 and uniform else ()),
        apart=personal[0] if personal else None,
    )


def _is_reference(row: Record) -> bool:
    return bool(row["name"].partition(":")[0] == "centralized")


def _list_columns(
    runs: Sequence[Record], rows: Sequence[Record], reference: str | None
) -> Iterator[tuple[str, list[str]]]:
    """Yield the columns, optional ones only if they were measured."""
    yield "strategy", [f"{row['strategy']}{'†' if row['diverged'] else ''}" for row in rows]
    metric = " or ".join(dict.fromkeys(run["metric"] for run in runs)) or "accuracy"
    yield f"{metric} (%)", [format_mean(r["accuracy"], r["spread"], r["seeds"]) for r in rows]
    if len({row["seeds"] for row in rows}) > 1:
        yield "n", [str(row["seeds"]) for row in rows]
    for key, title in (
        ("worst_client", "worst client (%)"),
        ("attack_success", "attack success (%)"),
    ):
        if any(row[key] is not None for row in rows):
            yield title, [format_percent(row[key]) for row in rows]
    if any(row["epsilon"] is not None for row in rows):
        yield "ε", [MISSING if row["epsilon"] is None else f"{row['epsilon']:.3g}" for row in rows]
    if reference is not None and any(row["difference"] is not None for row in rows):
        yield f"Δ {reference}", [_format_difference(row["difference"]) for row in rows]
        if any(row["p_holm"] is not None for row in rows):
            yield "p", [_write_p(row["p_holm"]) for row in rows]


def _format_difference(value: float | None) -> str:
    return format_points(None if value is None else 100 * value)


def _write_p(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"< {_SMALLEST}" if value < _SMALLEST else f"{value:.3f}"


def _write_caption(
    runs: Sequence[Record], rows: Sequence[Record], spec: TableSpec, reference: str | None
) -> str:
    """Say what the numbers are: metric, rounds, seeds, spread, test."""
    metric = " or ".join(dict.fromkeys(run["metric"] for run in runs)) or "accuracy"
    rounds = sorted({run["rounds"] for run in runs if run["status"] == "finished"})
    after = f" after {_write_range(rounds)} rounds" if rounds else ""
    over = describe_spread([row["seeds"] for row in rows], spec.spread)
    told = [f"{metric[:1].upper()}{metric[1:]} on test data{after}: {over}."]
    tested = [row for row in rows if row.get("p_holm") is not None]
    if any(row.get("difference") is not None for row in rows):
        told.append(f"Δ: points above {reference}, in the mean over the seeds of both.")
    if tested:
        pairs = [row["pairs"] for row in tested]
        corrected = (
            f", corrected for {len(tested)} comparisons after Holm" if len(tested) > 1 else ""
        )
        told.append(f"p: two-sided {TESTS[spec.test]} over seeds{corrected}.")
        if spec.test == "permutation":
            least = 2 ** (1 - min(pairs))
            told.append(f"With {min(pairs)} seeds, p before correction is at least {least:g}.")
    if reference and len({run["setting"] for run in runs}) > 1:
        told.append("Strategies are compared within one setting only.")
    if any(row["personal"] for row in rows):
        told.append("Personal models, in the mean over clients, are not compared with global ones.")
    told += [
        f"† {row['strategy']}: {row['diverged']} of {row['runs']} runs diverged."
        for row in rows
        if row["diverged"]
    ]
    return " ".join(told)


def describe_spread(counts: Sequence[int], spread: Spread) -> str:
    """Say over how many seeds means are, and what follows ±.

    >>> describe_spread([3, 3], "std"), describe_spread([2, 3], "std")[-20:]
    ('mean ± sample standard deviation over n = 3 seeds', 'ver n = 2 to 3 seeds')
    """
    if max(counts, default=0) <= 1:
        return "one seed, so neither spread nor significance is known"
    return f"mean ± {SPREADS[spread]} over n = {_write_range(counts)} seeds"


def _write_range(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return f"{most}" if least == most else f"{least} to {most}"


def write_csv(rows: Sequence[Record], columns: Sequence[str] = ()) -> str:
    """Return rows as CSV with a header: the given columns, or all of them.

    >>> print(write_csv([{"seed": 0, "accuracy": 0.5}, {"seed": 1}]), end="")
    seed,accuracy
    0,0.5
    1,
    """
    text = StringIO()
    titles = columns or list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(text, titles, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


class Tabular(ABC):
    """Results that can be written as tables; `print` and notebooks show them as one."""

    @abstractmethod
    def list_runs(self) -> list[dict[str, Any]]:
        """Return a row of plain numbers for each run; accuracies are fractions."""

    @abstractmethod
    def list_rounds(self) -> list[dict[str, Any]]:
        """Return a row for each evaluation of each run."""

    def list_rows(self, rows: Rows = "runs") -> list[dict[str, Any]]:
        """Return a row for each run, each evaluation ("rounds"), or each strategy."""
        if rows == "strategies":
            return summarize_runs(self.list_runs())
        if rows not in {"runs", "rounds"}:
            raise ConfigError(f"rows must be 'runs', 'rounds' or 'strategies', but are {rows!r}.")
        return self.list_runs() if rows == "runs" else self.list_rounds()

    def to_csv(self, path: str | Path | None = None, *, rows: Rows = "runs") -> str:
        """Return the rows as CSV, unrounded; write them to `path` if one is given.

        >>> import fednorm
        >>> run = fednorm.simulate("fbn", rounds=2, clients=3)
        >>> run.to_csv().splitlines()[0][:26]
        'strategy,name,setting,seed'
        """
        text = write_csv(self.list_rows(rows))
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def to_pandas(self, *, rows: Rows = "runs") -> Any:
        """Return the rows as a pandas DataFrame; needs `pip install ".[pandas]"`."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise MissingPandasError from error
        return pandas.DataFrame(self.list_rows(rows))

    def to_latex(
        self, *, spread: Spread = "std", against: str | None = None, test: Test = "t"
    ) -> str:
        r"""Return a LaTeX table of the strategies; it needs the package booktabs.

        Args:
            spread: what follows ±: the sample standard deviation or the 95 % confidence interval.
            against: label of the strategy that others are compared with; `naive` if it was run.
            test: "t", "permutation" or "none": how they are compared, paired over seeds.

        >>> import fednorm
        >>> run = fednorm.simulate("fbn", rounds=2, clients=3)
        >>> run.to_latex().splitlines()[1]
        '\\begin{table}'
        """
        return make_table(self.list_runs(), TableSpec(spread, against, test)).to_latex()

    def __str__(self) -> str:
        return make_table(self.list_runs()).to_text() if self.list_runs() else "no runs"

    def _repr_html_(self) -> str:
        return make_table(self.list_runs()).to_html() if self.list_runs() else "<p>no runs</p>"
