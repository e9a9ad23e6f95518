"""What `list` and `show` read from the source is what the imported class says."""

import dataclasses
import inspect
import sys

import pytest

from fednorm.cli.listing import KINDS, read_docstring, read_fields
from fednorm.data.partition.feature_shift import KINDS as SHIFTS

ENTRIES = [(registry, name) for registry in KINDS.values() for name in registry]


def default_of(field):
    if field.default_factory is not dataclasses.MISSING:
        return str(field.default_factory())
    return None if field.default is dataclasses.MISSING else str(field.default)


@pytest.mark.slow
@pytest.mark.parametrize(("registry", "name"), ENTRIES, ids=[name for _, name in ENTRIES])
def test_what_is_read_from_the_source_is_what_the_class_says(registry, name):
    cls, place = registry[name], registry.locate(name)
    assert place == (cls.__module__, cls.__qualname__)
    summary, _, text = inspect.cleandoc(cls.__doc__).partition("\n")
    module = inspect.getdoc(sys.modules[cls.__module__])
    assert read_docstring(*place) == (summary, text.strip() or module)
    fields = [(f.name, default_of(f), f.metadata["help"]) for f in dataclasses.fields(cls)]
    assert [(f.name, f.default, f.help) for f in read_fields(*place)] == fields


def test_fields_of_bases_in_other_modules_and_constants_are_found():
    inherited = {f.name: f for f in read_fields("fednorm.strategies.fbn", "FBN")}
    assert inherited["stats_momentum"].default == "layer"  # of strategies/base.py
    assert inherited["statistics"].default == "pool"  # which FBN replaces
    folder = read_fields("fednorm.data.datasets.folder", "ImageFolder")
    assert {f.name: f.default for f in folder}["channels"] == "3"  # a constant


def test_the_help_of_feature_shift_names_every_kind():
    (kind,) = (f for f in read_fields("fednorm.data.partition.feature_shift", "FeatureShift")[:1])
    assert all(name in kind.help for name in SHIFTS)
