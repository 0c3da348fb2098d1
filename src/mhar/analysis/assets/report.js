"use strict";
// Depth maps: choose a head, read a cell with the pointer, a finger or the arrow keys. Without scripts the mean stays.

function rampColour(anchors, fraction) {
  const position = Math.min(Math.max(fraction, 0), 1) * (anchors.length - 1);
  const index = Math.min(Math.floor(position), anchors.length - 2);
  const share = position - index;
  const mixed = anchors[index].map((a, i) => Math.round(a + (anchors[index + 1][i] - a) * share));
  return `rgb(${mixed.join(",")})`;
}

class DepthMap {
  constructor(figure, map, ramps) {
    Object.assign(this, { figure, map, ramps, head: -1, row: 0, column: 0 });
    this.svg = figure.querySelector("svg");
    this.cells = figure.querySelector(".cells");
    this.cursor = figure.querySelector(".cursor");
    this.readout = figure.querySelector(".readout");
    this.buttons = [...figure.querySelectorAll("button[data-head]")];
    for (const button of this.buttons) button.addEventListener("click", () => this.select(Number(button.dataset.head)));
    this.relative = figure.querySelector("button[data-relative]");
    if (this.relative) this.relative.addEventListener("click", () => this.toggleRelative());
    for (const type of ["pointermove", "pointerdown"]) this.svg.addEventListener(type, (event) => this.point(event));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  // Weight of one cell, or null where the site does not see the source.
  value(row, column, head = this.head) {
    const site = this.map.sites[row];
    const index = site ? site.columns.indexOf(column) : -1;
    if (index < 0) return null;
    const weights = site.weights[index];
    return head < 0 ? weights.reduce((sum, weight) => sum + weight, 0) / weights.length : weights[head];
  }

  get isRelative() {
    return this.relative?.getAttribute("aria-pressed") === "true" && this.head >= 0;
  }

  shown(row, column) {
    const weight = this.value(row, column);
    return weight === null || !this.isRelative ? weight : weight - this.value(row, column, -1);
  }

  select(head) {
    this.head = head;
    for (const button of this.buttons) button.setAttribute("aria-pressed", String(Number(button.dataset.head) === head));
    this.draw();
    this.describe();
  }

  toggleRelative() {
    this.relative.setAttribute("aria-pressed", String(this.relative.getAttribute("aria-pressed") !== "true"));
    if (this.head < 0) this.select(0);
    else this.select(this.head);
  }

  draw() {
    const values = this.map.sites.map((_, row) => this.map.columns.map((_, column) => this.shown(row, column)));
    const largest = Math.max(1e-6, ...values.flat().map((value) => Math.abs(value ?? 0)));
    const place = this.isRelative ? (value) => 0.5 + (0.5 * value) / largest : (value) => Math.sqrt(value);
    const anchors = this.isRelative ? this.ramps.diverging : this.ramps.sequential;
    const paths = new Map();
    values.forEach((line, row) => line.forEach((value, column) => {
      if (value === null) return;
      const fill = rampColour(anchors, Math.round(place(value) * 23) / 23);
      paths.set(fill, (paths.get(fill) ?? "") + `M${column} ${row}h1v1h-1z`);
    }));
    this.cells.innerHTML = [...paths].map(([fill, d]) => `<path fill="${fill}" d="${d}"/>`).join("");
  }

  point(event) {
    const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(this.cells.getScreenCTM().inverse());
    this.move(Math.floor(place.y), Math.floor(place.x));
  }

  key(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    this.move(this.row + step[0], this.column + step[1]);
  }

  move(row, column) {
    if (this.value(row, column) === null) return;
    Object.assign(this, { row, column, moved: true });
    this.cursor.setAttribute("x", column);
    this.cursor.setAttribute("y", row);
    this.cursor.style.visibility = "visible";
    this.describe();
  }

  describe() {
    if (!this.moved) return;
    const site = this.map.sites[this.row];
    const heads = site.weights[0].length;
    const weight = this.value(this.row, this.column);
    let text = `site ${site.name} · source ${this.map.columns[this.column]} · weight ${weight.toFixed(4)}`;
    text += this.head < 0 ? (heads > 1 ? ` (mean of ${heads} heads)` : "") : ` (head ${this.head})`;
    if (this.isRelative) text += ` · deviation from the heads' mean ${this.shown(this.row, this.column).toFixed(4)}`;
    this.readout.textContent = text + ` · uniform would be ${(1 / site.columns.length).toFixed(4)}`;
  }
}

const embedded = document.getElementById("depth-maps");
if (embedded) {
  const { maps, ramps } = JSON.parse(embedded.textContent);
  for (const figure of document.querySelectorAll(".depth-map")) new DepthMap(figure, maps[Number(figure.dataset.map)], ramps);
}
