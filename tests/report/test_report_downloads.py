"""Downloads that are part of the page, and settings that differ from the defaults."""

import csv
import re
import tomllib
from base64 import b64decode
from io import StringIO

from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.schema.load import build_experiment
from report.report_cases import CONFIG, comparison, page, run, three_strategies, two_panels


def read_links(html):
    found = re.findall(r'<a download="([^"]+)" href="data:[\w/+]+;base64,([^"]*)">', html)
    return {name: b64decode(content) for name, content in found}


def test_the_page_holds_its_tables_figure_and_config():
    files = read_links(page(three_strategies(), b"\x89PNG"))
    assert list(files) == ["results.csv", "curves.csv", "curves.svg", "curves.png", "config.toml"]
    rows = list(csv.DictReader(StringIO(files["results.csv"].decode())))
    assert [row["strategy"] for row in rows] == ["centralized", "fbn", "naive"]
    assert rows[1]["final accuracy %"] == "81.0 ± 1.4"
    points = list(csv.DictReader(StringIO(files["curves.csv"].decode())))
    assert len(points) == 12
    assert points[-1]["accuracy"] == "0.2"
    assert files["curves.svg"].startswith(b"<svg")
    assert files["curves.png"] == b"\x89PNG"
    assert tomllib.loads(files["config.toml"].decode())["partition"] == CONFIG["partition"]


def test_a_downloaded_config_can_be_run_again():
    experiment = Experiment(rounds=3, partition="iid", attack="alie", byzantine=1)
    config = experiment.model_dump(mode="json", exclude_none=True)
    text = read_links(page(comparison(run("fbn", (0.8,)), config=config)))["config.toml"].decode()
    assert build_experiment(tomllib.loads(text)) == experiment


def test_a_figure_of_several_panels_has_tables_alone():
    files = read_links(page(two_panels()))
    assert list(files) == ["results.csv", "curves.csv"]
    assert files["results.csv"].decode().splitlines()[1].startswith("γ = 0,centralized,90.0")


def test_settings_with_their_default_are_folded():
    config = Experiment(batch_size=7).model_dump(mode="json", exclude_none=True)
    settings = page(comparison(run("fbn", (0.8,)), config=config)).split("<h3>Settings</h3>")[1]
    first, folded = settings.split("All other settings have their defaults")
    assert "<dt>batch_size</dt><dd><code>7</code></dd>" in first
    assert "<dt>partition</dt>" in first  # what every reader asks for
    assert "<dt>participation</dt>" not in first
    assert "<dt>participation</dt>" in folded
