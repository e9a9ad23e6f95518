"""The page in a real browser: sorting, hiding, reading values, phones, and silence."""

from dataclasses import replace

import pytest

from fednorm.experiment.results import PanelResult
from report.browser import browse, browse_all, needs_browser
from report.report_cases import (
    NAN,
    comparison,
    diverged,
    page,
    run,
    told,
    two_panels,
)

pytestmark = [pytest.mark.browser, needs_browser]

POINT = """
const point = (number, share, kind = "pointermove", pointerType = "mouse") => {
  const plot = all(".plot")[number];
  const svg = all("svg", plot).find((one) => one.getClientRects().length);
  const area = svg.querySelector(".area").getBoundingClientRect();
  const at = { clientX: area.left + share * area.width, clientY: area.top + 9, bubbles: true };
  plot.dispatchEvent(new view.PointerEvent(kind, { ...at, pointerType }));
};
const readout = (number) => {
  const shown = all(".readout")[number];
  if (!shown.getClientRects().length) return null;
  const lines = all("li", shown).map((line) => texts(".name, b", line));
  return [shown.querySelector("strong").textContent, lines];
};
"""


def test_headers_sort_numbers_as_numbers_with_missing_ones_last(tmp_path):
    result = comparison(
        run("ten", (0.5,), bytes_up_per_round=9_000.0, seconds=7),
        diverged("never"),  # no rounds: no bytes
        run("Nine", (0.09,), bytes_up_per_round=10_000_000.0, seconds=7),
        run("two", (0.5,), bytes_up_per_round=800.0, seconds=1000),
    )
    script = """
    const headers = all("thead th");
    const press = (title) => {
      const header = headers.find((one) => one.textContent === title);
      header.querySelector("button").click();
      const sorted = headers.filter((one) => one.hasAttribute("aria-sort"));
      const states = sorted.map((one) => [one.textContent, one.getAttribute("aria-sort")]);
      return [texts("tbody th").join(" "), ...states.flat()];
    };
    const order = ["up / round", "up / round", "final accuracy %", "final accuracy %",
                   "strategy", "strategy", "s / run", "note"];
    return order.map(press);
    """
    assert browse(page(result), script, tmp_path).value == [
        ["Nine ten two never", "up / round", "descending"],
        ["two ten Nine never", "up / round", "ascending"],
        ["two ten Nine never", "final accuracy %", "descending"],  # ties keep their order
        ["Nine two ten never", "final accuracy %", "ascending"],
        ["never Nine ten two", "strategy", "ascending"],
        ["two ten Nine never", "strategy", "descending"],
        ["two never ten Nine", "s / run", "descending"],
        ["never two ten Nine", "note", "ascending"],
    ]


HIDE = (
    POINT
    + """
    const look = () => {
      const entry = all(".legend li").find((one) => one.textContent === "fbn");
      const method = entry.dataset.method;
      const drawn = all(`.plot g[data-method="${method}"]`);
      const rows = all(`tr[data-method="${method}"]`);
      const others = all("g[data-method]").filter((one) => one.dataset.method !== method);
      const visible = (one) => view.getComputedStyle(one).visibility === "visible";
      const clear = (row) => view.getComputedStyle(row.cells[0]).opacity === "1";
      point(0, 1);
      return {
        pressed: entry.querySelector("button").getAttribute("aria-pressed"),
        plots: new Set(drawn.map((one) => one.closest(".plot"))).size,
        drawn: drawn.map(visible).every(Boolean),
        gone: !drawn.some(visible),
        rows: [rows.length, rows.filter(clear).length],
        names: [...new Set(rows.map((row) => row.cells[0].textContent))],
        others: others.every(visible),
        read: readout(0)[1].map(([name]) => name),
      };
    };
    const press = () => all(".legend button").find((one) => one.textContent === "fbn").click();
    const before = look();
    press();
    const hidden = look();
    press();
    return [before, hidden, look()];
    """
)


def test_a_legend_entry_hides_its_method_everywhere_and_shows_it_again(tmp_path):
    before, hidden, again = browse(page(two_panels()), HIDE, tmp_path).value
    assert before == again
    assert before == {
        "pressed": "true",
        "plots": 2,
        "drawn": True,
        "gone": False,
        "rows": [4, 4],  # results and published numbers of two panels
        "names": ["fbn"],
        "others": True,
        "read": ["centralized", "fbn", "naive"],
    }
    assert hidden == {
        **before,
        "pressed": "false",
        "drawn": False,
        "gone": True,
        "rows": [4, 0],
        "read": ["centralized", "naive"],
    }


def test_the_values_of_the_nearest_round_are_read_highest_first(tmp_path):
    result = comparison(
        run("gn", (0.5, 0.613, 0.4)),
        run("fbn", (0.75, 0.85, 0.9)),
        run("fbn", (0.85, 0.87, 0.9), 1),
        diverged("naive", (0.1, 0.2)),
        run("fixbn", (0.3, NAN, 0.5)),
    )
    script = (
        POINT
        + """
    const seen = [readout(0)];
    for (const share of [0.3, 0.7, 2]) { point(0, share); seen.push(readout(0)); }
    seen.push(all(".dot").length, texts(".readout small")[1]);
    point(0, 0.5);
    const dots = all(".dot").map((dot) => dot.getBoundingClientRect());
    const hair = page.querySelector(".crosshair").getBoundingClientRect();
    seen.push(dots.every((dot) => Math.abs(dot.left + dot.width / 2 - hair.left) < 2));
    point(0, 0.5, "pointerleave");
    seen.push(readout(0), all(".crosshair, .dot").length);
    for (const kind of ["pointerdown", "pointerleave"]) point(0, 1, kind, "touch");
    return [...seen, readout(0)[0]];  // a finger that lifts leaves the values to be read
    """
    )
    third = [["fbn", "90.0"], ["fixbn", "50.0"], ["gn", "40.0"], ["naive", "–"]]
    assert browse(page(result), script, tmp_path).value == [
        None,
        ["Round 20", [["fbn", "86.0"], ["gn", "61.3"], ["naive", "20.0"], ["fixbn", "–"]]],
        ["Round 20", [["fbn", "86.0"], ["gn", "61.3"], ["naive", "20.0"], ["fixbn", "–"]]],
        ["Round 30", third],
        3,
        "",
        True,
        None,
        0,
        "Round 30",
    ]


def test_dots_lie_on_the_drawn_curves(tmp_path):
    script = (
        POINT
        + """
    return [0, 1].flatMap((number) => [0, 1].map((share) => {
      point(number, share);
      const plot = all(".plot")[number];
      const svg = all("svg", plot).find((one) => one.getClientRects().length);
      const markers = all("use", svg).map((one) => one.getBoundingClientRect());
      const middle = (box) => [box.left + box.width / 2, box.top + box.height / 2];
      const close = (a, b) => Math.hypot(a[0] - b[0], a[1] - b[1]) < 2;
      const dots = all(".dot", svg).map((dot) => middle(dot.getBoundingClientRect()));
      const on = dots.filter((dot) => markers.some((marker) => close(middle(marker), dot)));
      return [dots.length, on.length];
    }));
    """
    )
    assert browse(page(two_panels()), script, tmp_path).value == [[3, 3], [3, 3], [3, 3], [2, 2]]


def test_the_keyboard_reads_values_too(tmp_path):
    script = (
        POINT
        + """
    const plot = page.querySelector(".plot");
    const press = (key) => {
      plot.dispatchEvent(new view.KeyboardEvent("keydown", { key, cancelable: true }));
      return readout(0)?.[0] ?? null;
    };
    plot.dispatchEvent(new view.FocusEvent("focus"));
    const keys = ["ArrowLeft", "ArrowLeft", "ArrowLeft", "End", "ArrowRight", "Home", "Escape"];
    const seen = [plot.tabIndex, readout(0)[0], ...keys.map(press)];
    press("Home");
    plot.dispatchEvent(new view.FocusEvent("blur"));
    return [...seen, readout(0)];
    """
    )
    result = comparison(run("fbn", (0.1, 0.2, 0.3)))
    rounds = ["Round 30", "Round 20", "Round 10", "Round 10", "Round 30", "Round 30", "Round 10"]
    assert browse(page(result), script, tmp_path).value == [0, *rounds, None, None]


ODD = ["</script><script>alert(1)</script>", "<b>bold</b>", "\"quoted\" 'too'", "$x$ & &amp;", "\\"]


def test_labels_are_never_read_as_html(tmp_path):
    result = comparison(*(run(label, (0.9 - number / 10,)) for number, label in enumerate(ODD)))
    figure = told(PanelResult("<i>", result, dict.fromkeys(ODD, 50.0)), question=ODD[0])
    script = (
        POINT
        + """
    point(0, 0.5);
    const legend = texts(".legend button");
    all(".legend button")[1].click();
    return [legend, readout(0)[1].map(([name]) => name), texts("tbody th"), texts("h1"),
            all("script").length, all("b b, h1 *, h3 *").length, texts("tr.off th")];
    """
    )
    seen = browse(page(figure), script, tmp_path)
    assert seen.value[:4] == [ODD, ODD, ODD * 2, [ODD[0]]]
    assert seen.value[4:] == [2, 0, [ODD[1]] * 2]
    assert seen.console == []


WHOLE_LIFE = (
    POINT
    + """
for (const button of all("button")) button.click();
for (const button of all("button")) button.click();
all(".plot").forEach((plot, number) => {
  plot.dispatchEvent(new view.FocusEvent("focus"));
  if (plot.querySelector(".area")) point(number, 0.5);
});
return { loaded: view.performance.getEntriesByType("resource"),
         wide: page.documentElement.scrollWidth - page.documentElement.clientWidth,
         outside: all("svg text").filter((text) => {
           const box = text.getBoundingClientRect();
           return box.width && (box.left < 0 || box.right > view.innerWidth);
         }).length };
"""
)
LIVES = {
    "two panels": two_panels(),
    "final values": replace(two_panels(), finals="γ", curves=("γ = 0",)),
    "no runs": comparison(),
    "no panels": told(),
    "all diverged": comparison(diverged("fbn"), diverged("gn", (NAN,))),
    "a panel without curves": told(
        *two_panels().panels, PanelResult("none", comparison(diverged("x")))
    ),
    "long words": replace(
        told(PanelResult("p" * 90, comparison(run("g" * 99, (0.5, 0.6))), {"g" * 99: 50.0})),
        question="q" * 90,
        command="c" * 200,
        cuts=("w" * 90,),
    ),
}


def test_a_method_is_hidden_among_final_values_too(tmp_path):
    figure = replace(two_panels(), finals="γ", curves=("γ = 0",))
    script = """
    const visible = (one) => view.getComputedStyle(one).visibility === "visible";
    const shown = () => all(".finals g[data-method]").filter(visible);
    const before = shown().length;
    all(".legend button")[0].click();
    return [before > 0, shown().length < before, all(".readout").length];
    """
    assert browse(page(figure), script, tmp_path).value == [True, True, 1]


def test_the_page_is_silent_fits_and_loads_nothing(tmp_path):
    sizes = [(name, width) for name in LIVES for width in (360, 1100)]
    pages = [(page(LIVES[name]), width) for name, width in sizes]
    seen = browse_all(pages, WHOLE_LIFE, tmp_path)
    assert seen.console == []
    found = dict(zip(sizes, seen.value, strict=True))
    assert found == {size: {"loaded": [], "wide": 0, "outside": 0} for size in sizes}


def test_the_policy_stops_a_request_and_a_script(tmp_path):
    bad = '<img src="https://example.org/x.png"><script>window.ran = true</script></body>'
    html = page(two_panels()).replace("</body>", bad)
    seen = browse(html, "return view.ran === undefined", tmp_path)
    assert seen.value is True
    assert len([line for line in seen.console if "Content Security Policy" in line]) == 2


def test_without_script_the_page_has_no_buttons_and_all_else(tmp_path):
    html = page(two_panels()).replace("script-src 'sha256-", "script-src 'sha256-x")
    script = """return [all("button").length, texts(".legend li").join(" "),
                        all("figure svg").length, all("tbody tr").length]"""
    legend = "centralized fbn naive gn ×diverged - -published"
    assert browse(html, script, tmp_path).value == [0, legend, 4, 12]
