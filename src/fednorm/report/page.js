"use strict";
// The page can be read without this script. It adds three things: values under the pointer,
// methods that hide at a click, tables that sort. It reads no address and sends nothing.
(() => {
  const data = JSON.parse(document.getElementById("plots").textContent);
  const hidden = new Set(); // numbers of methods
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  function make(name, kind, ...content) {
    const element = document.createElement(name);
    element.className = kind;
    element.append(...content);
    return element;
  }

  function makeSvg(name, attributes) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  }

  /** Put the content of an element into a button, which acts when it is pressed. */
  function asButton(element, act) {
    const button = make("button", "", ...element.childNodes);
    button.type = "button";
    button.addEventListener("click", act);
    element.append(button);
    return button;
  }

  // ---- Hiding: a legend's entry takes its method out of every plot and dims its rows.

  function toggle(method) {
    if (!hidden.delete(method)) hidden.add(method);
    for (const element of all(`[data-method="${method}"]`)) {
      element.classList.toggle("off", hidden.has(method));
    }
    for (const button of all(`.legend [data-method="${method}"] button`)) {
      button.setAttribute("aria-pressed", String(!hidden.has(method)));
    }
  }

  function hideable(entry) {
    const method = Number(entry.dataset.method);
    const button = asButton(entry, () => toggle(method));
    button.setAttribute("aria-pressed", "true");
    button.title = `Show or hide ${data.methods[method]}`;
  }

  // ---- Sorting: numbers begin with the largest, text with A; what is missing stays last.

  function sortValue(row, column, numeric) {
    const cell = row.cells[column];
    if (!numeric) return cell.textContent.trim() || null;
    return cell.dataset.value === undefined ? null : Number(cell.dataset.value);
  }

  function compareValues(a, b, sign) {
    if (a === null || b === null) return (a === null) - (b === null);
    return sign * (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));
  }

  function sort(table, header) {
    const numeric = header.classList.contains("number");
    const before = header.getAttribute("aria-sort") ?? (numeric ? "ascending" : "descending");
    const direction = before === "ascending" ? "descending" : "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", direction);
    const sign = direction === "ascending" ? 1 : -1;
    const value = (row) => sortValue(row, header.cellIndex, numeric);
    for (const body of all("tbody:not(.group)", table)) {
      body.append(...[...body.rows].sort((a, b) => compareValues(value(a), value(b), sign)));
    }
  }

  // ---- Reading: a line at the nearest round, and the values of all methods in sight.

  /** Return the nearest of the rounds at which a method in sight was evaluated. */
  function nearestRound(curves, position) {
    const rounds = new Set(curves.flatMap((curve) => curve.rounds));
    const distance = (round) => Math.abs(round - position);
    return [...rounds].reduce((best, round) => (distance(round) < distance(best) ? round : best));
  }

  /** Return the values of a round, highest first; a curve that has none there comes last. */
  function valuesAt(curves, round) {
    const found = curves.map(({ method, rounds, mean, low, high }) => {
      const at = rounds.indexOf(round);
      return { method, mean: mean[at] ?? null, low: low[at], high: high[at] };
    });
    return found.sort((a, b) => compareValues(a.mean, b.mean, -1));
  }

  function line({ method, mean, low, high }) {
    const swatch = document.querySelector(`.legend [data-method="${method}"] svg`).cloneNode(true);
    const value = make("b", "", mean === null ? "–" : mean.toFixed(1));
    const range = high > low ? `${low.toFixed(1)} to ${high.toFixed(1)}` : "";
    const name = make("span", "name", data.methods[method]);
    return make("li", "", swatch, name, value, make("small", "", range));
  }

  class Reader {
    constructor(plot) {
      this.plot = plot;
      this.panel = data.panels[plot.dataset.panel];
      this.readout = make("div", "readout");
      this.readout.setAttribute("role", "status");
      this.readout.hidden = true;
      this.round = null;
      this.marks = [];
      plot.append(this.readout);
      plot.tabIndex = 0;
      plot.setAttribute("role", "group");
      const where = this.panel.title ? ` of ${this.panel.title}` : "";
      plot.setAttribute("aria-label", `Curves${where}; arrow keys read them round by round`);
      plot.addEventListener("pointermove", (event) => this.point(event));
      plot.addEventListener("pointerdown", (event) => this.point(event));
      plot.addEventListener("pointerleave", (event) => {
        if (event.pointerType === "mouse") this.close(); // a finger leaves whenever it lifts
      });
      plot.addEventListener("focus", () => this.round ?? this.show(Infinity));
      plot.addEventListener("blur", () => this.close());
      plot.addEventListener("keydown", (event) => this.press(event));
    }

    get curves() {
      return this.panel.curves.filter((curve) => !hidden.has(curve.method));
    }

    /** Return the drawing in sight (one of two, by width) and the rectangle of its axes. */
    get drawing() {
      const svg = all("svg", this.plot).find((one) => one.getClientRects().length);
      return { svg, area: svg.querySelector(".area").getBBox() };
    }

    point(event) {
      const { svg, area } = this.drawing;
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      const [from, to] = this.panel.x;
      this.show(from + ((x - area.x) / area.width) * (to - from));
    }

    press(event) {
      const rounds = [...new Set(this.curves.flatMap((curve) => curve.rounds))];
      rounds.sort((a, b) => a - b);
      const at = rounds.indexOf(this.round);
      const last = rounds.length - 1;
      const target = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
      if (event.key === "Escape") this.close();
      if (target === undefined || !rounds.length) return;
      event.preventDefault(); // the page would scroll
      this.show(rounds[Math.min(Math.max(target, 0), last)]);
    }

    show(position) {
      this.close();
      const { curves } = this;
      if (!curves.length) return;
      const end = Math.max(...curves.flatMap((curve) => curve.rounds));
      this.round = nearestRound(curves, Math.min(position, end));
      const values = valuesAt(curves, this.round);
      const place = this.mark(values);
      const title = make("strong", "", `Round ${this.round}`);
      const unit = make("small", "", ` ${this.panel.metric}, %`);
      const list = make("ul", "", ...values.map(line));
      this.readout.replaceChildren(make("p", "", title, unit), list);
      this.readout.hidden = false;
      this.place(place, values);
    }

    /** Draw the line and a dot on each curve; return where the line is, in pixels of the plot. */
    mark(values) {
      const { svg, area } = this.drawing;
      const along = (value, [from, to]) => (value - from) / (to - from);
      const x = area.x + along(this.round, this.panel.x) * area.width;
      const y = (value) => area.y + (1 - along(value, data.y)) * area.height;
      this.marks = values
        .filter(({ mean }) => mean !== null)
        .map(({ mean }) => makeSvg("circle", { class: "dot", cx: x, cy: y(mean), r: 3.2 }));
      const ends = { x1: x, x2: x, y1: area.y, y2: area.y + area.height };
      this.marks.unshift(makeSvg("line", { class: "crosshair", ...ends }));
      svg.append(...this.marks);
      const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
      return { x: x * scale, top: ends.y1 * scale, bottom: ends.y2 * scale };
    }

    /** Put the readout beside the line, on the side with more room, away from most values. */
    place({ x, top, bottom }, values) {
      const { clientWidth } = this.plot;
      const { offsetWidth, offsetHeight, style } = this.readout;
      const left = x > clientWidth / 2 ? x - offsetWidth - 12 : x + 12;
      style.left = `${Math.max(0, Math.min(left, clientWidth - offsetWidth))}px`;
      const middle = (data.y[0] + data.y[1]) / 2;
      const high = values.filter(({ mean }) => mean > middle).length;
      style.top = `${high > values.length / 2 ? Math.max(0, bottom - offsetHeight - 6) : top}px`;
    }

    close() {
      for (const mark of this.marks) mark.remove();
      this.marks = [];
      this.round = null;
      this.readout.hidden = true;
    }
  }

  document.documentElement.classList.add("live");
  all(".legend [data-method]").forEach(hideable);
  for (const table of all("table")) {
    for (const header of table.tHead.rows[0].cells) asButton(header, () => sort(table, header));
  }
  for (const plot of all(".plot[data-panel]")) {
    if (data.panels[plot.dataset.panel].curves.length) new Reader(plot);
  }
})();
