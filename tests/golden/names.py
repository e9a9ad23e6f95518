"""The names that users write: in Python, in a TOML file and on the command line.

`python tests/golden/names.py` writes the list anew; its commit says which names go, and why.
"""

import dataclasses
import json
import sys
from pathlib import Path

import typer.main

import fednorm
from fednorm.cli import app
from fednorm.cli.listing import KINDS
from fednorm.experiment.schema.config import Experiment

RECORD = Path(__file__).with_name("names.json")


def collect():
    """Return all public names, by where they are written."""
    commands = typer.main.get_command(app).commands
    return {
        "fednorm": sorted(fednorm.__all__),
        "experiment": sorted(Experiment.model_fields),
        "commands": {
            name: sorted(option for p in command.params for option in p.opts)
            for name, command in sorted(commands.items())
        },
        **{
            kind: {
                name: sorted(f.name for f in dataclasses.fields(cls))
                for name, cls in sorted(known.items())
            }
            for kind, known in KINDS.items()
        },
    }


if __name__ == "__main__":
    RECORD.write_text(json.dumps(collect(), indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(f"names in {RECORD}\n")
