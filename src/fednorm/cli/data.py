"""`fednorm data get` and `fednorm data list`: data sets on this machine."""

import time
from pathlib import Path
from typing import Annotated

import typer

from fednorm.cli.options import complete_key
from fednorm.cli.terminal import Command, console
from fednorm.data import DATASETS
from fednorm.errors import ConfigError
from fednorm.experiment.schema.load import override_settings
from fednorm.experiment.schema.specs import Spec, create_entry
from fednorm.report.format import Column, format_bytes, make_table

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Get data sets and list those on this machine.\n\n"
    "They are kept in `$FEDNORM_DATA`, by default `fednorm` in your cache folder. "
    "A run gets its data by itself.",
)


@app.command(cls=Command)
def get(
    name: Annotated[
        str,
        typer.Argument(
            help="a name that `fednorm data list` shows", autocompletion=complete_key("data")
        ),
    ],
    root: Annotated[
        Path | None,
        typer.Option("--data-dir", "--root", help="folder with a copy of torchvision, Keras, …"),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="a field of the data set: size=64"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="chooses samples, where not all are used")] = 0,
) -> None:
    """Fetch a data set, or read your copy of it, so that runs find it decoded.

    For example:

    - `fednorm data get cifar10`

    - `fednorm data get cifar100 --data-dir ~/torchvision`

    - `fednorm data get imagenet --data-dir /data/ILSVRC --set size=32 --set train=100000`
    """
    DATASETS.locate(name)
    given = [f"data.{setting}" for setting in settings or []]
    fields = Spec.model_validate(override_settings({"data": name}, given)["data"]).fields
    fields |= {"root": str(root)} if root else {}
    start = time.monotonic()
    try:
        data = create_entry(DATASETS, name, fields).load(seed)
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error
    console.print(
        f"{name}: {len(data.y)} training and {len(data.y_test)} test samples of shape "
        f"{data.shape}, {data.classes} classes; {time.monotonic() - start:.1f} s.",
        highlight=False,
        soft_wrap=True,
    )


@app.command("list", cls=Command)
def list_() -> None:
    """List data sets: whether they are here, where, how large, and where they come from."""
    from fednorm.data.cache import get_decoded_home
    from fednorm.data.image_dataset import ImageDataset

    rows = []
    for name, cls in DATASETS.items():
        place = get_decoded_home() / name
        if not issubclass(cls, ImageDataset):
            rows.append([name, "yes", "", "", "comes with fednorm"])
        elif size := _size(place):
            rows.append([name, "yes", format_bytes(size), str(place), ", ".join(cls.sources)])
        else:
            rows.append([name, "no", "", "", ", ".join(cls.sources)])
    columns = [Column("name"), Column("here"), Column("size")]
    columns += [Column("where", wraps=True), Column("comes from", wraps=True)]
    console.print(make_table(columns, rows, ruled=False))


def _size(folder: Path) -> int:
    """Return the bytes of the complete decoded data sets in a folder."""
    from fednorm.data.cache import INDEX

    whole = [index.parent for index in (*folder.glob(INDEX), *folder.glob(f"*/{INDEX}"))]
    return sum(path.stat().st_size for one in whole for path in one.iterdir())
