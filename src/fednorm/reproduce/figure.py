"""The schema of a table or figure with panels, published or your own, and where its files are."""

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fednorm.errors import ConfigError
from fednorm.experiment.schema.load import read_toml
from fednorm.registry import unknown


class PanelSpec(BaseModel):
    """One part of a figure, or one column of a table."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str = Field(description="such as 'γ = 0'")
    set: dict[str, Any] = Field(default={}, description="what differs from [experiment]")
    short: dict[str, Any] = Field(default={}, description="further changes of the short scale")
    published: dict[str, float] = Field(default={}, description="per cent, by label")
    published_std: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={}, description="standard deviations of published means, in points, by label"
    )
    published_exchanges: dict[str, float] = Field(
        default={}, description="exchanges a round, by label"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if alone := sorted(set(self.published_std) - set(self.published)):
            raise ValueError(
                f"{alone[0]!r} has a published standard deviation but no published mean; give "
                "both, under the same label"
            )
        return self


class Figure(BaseModel):
    """A table or figure; `experiment` is the setting of all panels, the paper's if published."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str = ""
    question: str = ""
    source: str = Field(default="", description="the paper; none for panels of your own")
    note: str = Field(default="", description="what had to be assumed")
    finals: str = Field(default="", description="axis of a plot of final values by panel")
    curves: list[str] | None = Field(default=None, description="panels whose curves are drawn")
    heat: tuple[str, str] | None = Field(
        default=None, description="two labels whose difference is drawn as heat maps"
    )
    best: bool = Field(default=False, description="published numbers are the best of a run")
    ring: dict[str, int] | None = Field(default=None, description="drawn by `fednorm ring`")
    experiment: dict[str, Any] = {}
    short: dict[str, Any] = {}
    panels: list[PanelSpec] = []


def find_configs() -> Path:
    """Return the folder of the files: in the package, or next to its source."""
    package = Path(__file__).parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parents[1] / "configs"


def list_figures() -> dict[str, Figure]:
    """Return every published table and figure by name."""
    # Other experiments in the same folder have no source.
    found = {
        path.stem: read_toml(path)
        for path in sorted(find_configs().glob("*.toml"), key=_make_sort_key)
    }
    return {name: _validate(name, values) for name, values in found.items() if "source" in values}


def find_figure(name: str) -> Figure:
    """Return the figure with that name, or the one in a TOML file."""
    if name.endswith(".toml"):
        return _validate(name, read_toml(Path(name)))
    known = list_figures()
    if name not in known:
        raise unknown("table or figure", name, known)
    return known[name]


def _validate(name: str, values: dict[str, Any]) -> Figure:
    try:
        return Figure.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        ours = first["type"] == "value_error"
        said = str(first["ctx"]["error"]) if ours else first["msg"].lower()
        raise ConfigError(f"{name}: {where}: {said}.") from None


def _make_sort_key(path: Path) -> tuple[str, int, str]:
    """Sort fig2 before fig10."""
    word = path.stem.rstrip("0123456789")
    return word, int(path.stem[len(word) :] or 0), path.stem
