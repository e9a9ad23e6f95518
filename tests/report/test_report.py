"""The folder that a report is written into, and its page."""

import json
import re
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256

import pytest

from fednorm.experiment.results import Comparison, Evaluation, PanelResult
from fednorm.report import write
from fednorm.report.tables import fill_rows
from fednorm.report.write import write_comparison
from report.report_cases import (
    CONFIG,
    EDGE_CASES,
    ENVIRONMENT,
    NAN,
    Elements,
    comparison,
    diverged,
    page,
    personal,
    run,
    three_strategies,
    told,
)

PROMISED = {
    "strategy",
    "seed",
    "final",
    "best_accuracy",
    "rounds",
    "exchanges_per_round",
    "bytes_up_per_round",
    "bytes_down_per_round",
    "seconds",
}


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


def written(result, folder):
    write_comparison(result, folder)
    text = (folder / "results.json").read_text(encoding="utf-8")
    return json.loads(text, parse_constant=refuse)


@pytest.mark.slow
def test_write_leaves_three_whole_files_and_no_temporary_ones(tmp_path):
    report = write_comparison(three_strategies(), tmp_path / "new" / "folder")
    assert report == tmp_path / "new" / "folder" / "report.html"
    names = {path.name for path in report.parent.iterdir()}
    assert names == {"results.json", "curves.png", "report.html"}
    png = (report.parent / "curves.png").read_bytes()
    assert report.read_text(encoding="utf-8") == page(three_strategies(), png)


@pytest.mark.slow
def test_a_failing_write_keeps_the_old_file(tmp_path, monkeypatch):
    write_comparison(three_strategies(), tmp_path)
    before = (tmp_path / "curves.png").read_bytes()

    def fail(_comparison, file):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(write, "write_curves", fail)
    with pytest.raises(OSError, match="disk full"):
        write_comparison(comparison(run("gn", (0.1,))), tmp_path)
    assert (tmp_path / "curves.png").read_bytes() == before
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_results_json_has_the_promised_schema(tmp_path):
    record = written(three_strategies(), tmp_path)
    assert list(record) == ["schema", "environment", "config", "runs", "label_counts"]
    assert record["schema"] == 1
    assert record["environment"] == ENVIRONMENT
    assert record["config"] == CONFIG
    assert len(record["runs"]) == 6
    assert all(set(entry) >= PROMISED for entry in record["runs"])
    assert record["runs"][3]["final"]["accuracy"] == 0.82
    assert record["runs"][3]["final"]["loss"] == pytest.approx(0.18)
    assert record["runs"][5]["best_accuracy"] == 0.20


def test_numbers_that_are_not_finite_become_null(tmp_path):
    last = Evaluation(10, 0.1, loss=NAN, train_loss=float("inf"))
    broken = replace(diverged("naive"), history=(last,), rounds=10)
    result = comparison(broken, config={"nested": [{"limit": float("-inf")}]})
    record = written(result, tmp_path)
    final = record["runs"][0]["final"]
    assert final["accuracy"] == 0.1
    assert final["loss"] is None
    assert final["train_loss"] is None
    assert record["config"] == {"nested": [{"limit": None}]}


def test_a_run_without_evaluation_is_written(tmp_path):
    entry = written(comparison(diverged("naive")), tmp_path)["runs"][0]
    assert entry["status"] == "diverged"
    assert entry["best_accuracy"] is None
    assert entry["final"].get("accuracy") is None


@pytest.mark.slow
def test_personal_runs_give_every_client(tmp_path):
    result = comparison(personal("fedbn", (0.9, 0.5, 0.7)))
    entry = written(result, tmp_path)["runs"][0]
    assert entry["personal"] is True
    assert entry["final"]["per_client"] == [0.9, 0.5, 0.7]
    assert "90.0 · 50.0 · 70.0" in page(result)
    assert "fedbn there is no global model: accuracy is the mean over clients" in page(result)
    assert fill_rows(result)[0]["note"] == "mean over clients"


@pytest.mark.slow
@pytest.mark.parametrize("result", EDGE_CASES.values(), ids=EDGE_CASES)
def test_the_page_loads_nothing(result):
    html = page(result)
    elements = Elements(html)
    addresses = [(k, v) for k, v in elements.attributes if v and "://" in v]
    assert {name for name, _ in addresses} <= {"xmlns", "xmlns:xlink"}
    assert not {"link", "img", "iframe", "object", "embed"} & set(elements.tags)
    assert not {"src", "srcset", "action", "onload"} & {name for name, _ in elements.attributes}
    assert not re.search(r"@import|url\((?!#)", html)
    without_names = re.sub(r'xmlns(:\w+)?="[^"]*"|"http://www.w3.org/2000/svg"', "", html)
    assert not re.search(r"https?://", without_names)


def test_the_policy_allows_the_one_script_and_no_request():
    html = page(three_strategies())
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', html)
    script = html.split("<script>")[1].split("</script>")[0]
    digest = b64encode(sha256(script.encode()).digest()).decode()
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert html.index("Content-Security-Policy") < html.index("<style")
    assert html.count("<script") == 2


def test_all_text_from_outside_is_escaped():
    evil = '</script><script>alert("x")</script>'
    result = Comparison(
        {"data": evil, evil: {"a": [evil, {"b": evil}]}},
        {"torch": evil},
        (run(evil, (0.5,)), diverged(f"fbn {evil}", (0.5,), error=evil)),
    )
    figure = told(
        PanelResult(evil, result, {evil: 3.0}),
        title=evil,
        question=evil,
        command=evil,
        cuts=(evil,),
    )
    for html in (page(result), page(replace(figure, source=evil))):
        assert "<script>alert" not in html
        assert html.count("&lt;script&gt;") >= 9
        assert Elements(html).tags.count("script") == 2
        (data,) = re.findall(r'id="plots">(.*?)</script>', html)
        assert json.loads(data)["methods"] == [evil, f"fbn {evil}"]


def test_a_label_cannot_add_a_script_to_the_page():
    html = page(comparison(run("<script>alert(1)</script>", (0.5,))))
    assert "<script>alert(1)" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert Elements(html).tags.count("script") == 2


def test_the_page_says_what_was_run():
    html = page(three_strategies())
    assert "Which normalization survives these clients?" in html
    assert "dirichlet (alpha 0.1); mlp on digits; 20 rounds of fedavg" in html
    assert "<dt>partition.alpha</dt><dd><code>0.1</code></dd>" in html
    listed = "[&#34;fbn&#34;, { name = &#34;naive&#34;, pool = true }]"
    assert f"<dt>strategies</dt><dd><code>{listed}</code></dd>" in html
    assert "<dt>seeds</dt><dd><code>0, 1</code></dd>" in html
    assert "<dt>torch</dt><dd><code>2.6.0</code></dd>" in html
    assert "<code>fednorm run config.toml</code>" in html
    assert "Failures" not in html


def test_the_page_says_how_models_were_converted():
    notes = ("2 layers BatchNorm2d → GroupNorm(2 groups)", "1 layer: γ and β are dropped")
    text = page(comparison(run("fbn", [0.5]), run("gn", [0.5], conversion=notes)))
    assert "Model, as converted" in text
    assert "; ".join(notes) in text
    assert "Model, as converted" not in page(comparison(run("fbn", [0.5])))


def test_failures_are_listed_with_their_message():
    html = page(comparison(run("fbn", (0.8,)), diverged("naive", (0.2,), error="loss is nan")))
    failure = "<strong>naive</strong>, seed 0: diverged after 10 rounds<pre>loss is nan</pre>"
    assert failure in html
