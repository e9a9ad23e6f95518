"""CONTRIBUTING.md shows the tree as it is, and how to add a strategy that works."""

import importlib.util
import inspect
import re
import sys

import pytest

import fednorm
from docs.pages import ROOT, list_blocks
from docs.regenerate import MISSING, list_files, read_tree, render_tree
from fednorm.strategies import STRATEGIES

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BASE = next(c for c in STRATEGIES["naive"].__mro__ if c.__name__ == "Strategy")


def test_the_tree_is_the_one_of_the_package():
    tree = read_tree()
    assert {name: files for name, (_, files) in tree.items()} == list_files()
    assert render_tree() in PAGE  # also the form in which the script writes it


def test_every_folder_has_a_description():
    tree = read_tree()
    assert len(tree) > 15
    assert [name for name, (said, _) in tree.items() if not said or said == MISSING] == []


def test_the_table_lists_every_public_member_of_a_strategy():
    (table,) = re.findall(r"\| to decide \| member \|\n((?:\|.*\n)+)", PAGE)
    listed = [name for row in table.splitlines()[1:] for name in re.findall(r"`(\w+)`", row)]
    public = {name for name in dir(BASE) if not name.startswith("_")}
    public |= {name for name in inspect.get_annotations(BASE) if not name.startswith("_")}
    assert sorted(listed) == sorted(public)


@pytest.mark.parametrize(
    "registry",
    re.findall(r"`([A-Z_]+)`(?: or `[A-Z_]+`)? in `(\w[\w/]*/__init__\.py)`", PAGE),
    ids=lambda found: found[0],
)
def test_every_registry_of_the_recipes_exists(registry):
    name, path = registry
    module = importlib.import_module(
        f"fednorm.{path.removesuffix('/__init__.py')}".replace("/", ".")
    )
    assert len(getattr(module, name)) > 1


def test_the_recipes_name_every_registry():
    found = re.findall(r"`([A-Z_]+)`(?: or `([A-Z_]+)`)? in `\w[\w/]*/__init__\.py`", PAGE)
    assert {name for pair in found for name in pair if name} == {
        "STRATEGIES", "ALGORITHMS", "AGGREGATORS", "PRE_AGGREGATORS", "ATTACKS", "PARTITIONS",
        "DATASETS", "MODELS", "ENGINES", "CALLBACKS",
    }  # fmt: skip


def test_the_strategy_of_the_recipe_trains(tmp_path, monkeypatch):
    (block,) = [b for b in list_blocks("python") if b.page == "CONTRIBUTING.md"]
    path = tmp_path / "mine.py"
    path.write_text(block.text)
    spec = importlib.util.spec_from_file_location("mine", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mine", module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(STRATEGIES, "mine", module.Mine)
    run = fednorm.simulate("mine", rounds=3, clients=3, eval_every=1)
    assert run.status == "finished"
    assert len({e.loss for e in run.history}) == 3
