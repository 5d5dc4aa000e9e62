// A table of any number of rows, of which only those in view are in the document. One row has the focus at a time:
// arrows, Page Up, Page Down, Home and End move it, Enter opens it.

import { h } from "./dom.js";

const ROW_PX = 32;
const SPARE = 12;

export class VirtualTable {
  #shown = [];
  #current = 0;
  #drawn = "";

  // columns: {name, title, kind, cell(row), by(row)}; `onSort(name)`; `place(row)` is the row's link.
  constructor(caption, columns, place, onSort) {
    this.columns = columns;
    this.place = place;
    this.heads = columns.map((column) =>
      h(
        "th",
        { scope: "col", class: column.kind },
        h("button", { type: "button", onclick: () => onSort(column.name) }, column.title),
      ),
    );
    this.body = h("tbody", { onkeydown: (event) => this.#key(event) });
    this.table = h(
      "table",
      { class: "virtual", "aria-label": caption },
      h("thead", null, h("tr", null, this.heads)),
      this.body,
    );
    this.element = h("div", { class: "virtual-scroll", onscroll: () => this.#draw() }, this.table);
    this.#resized = new ResizeObserver(() => this.#draw());
    this.#resized.observe(this.element);
  }

  #resized;

  close() {
    this.#resized.disconnect();
  }

  show(rows, sort, descending) {
    const before = this.#shown[this.#current]?.job_id;
    this.#shown = rows;
    const at = before ? rows.findIndex((row) => row.job_id === before) : -1;
    this.#current = Math.max(0, Math.min(at >= 0 ? at : this.#current, rows.length - 1));
    this.table.setAttribute("aria-rowcount", rows.length + 1);
    this.heads.forEach((head, index) => {
      const isSorted = this.columns[index].name === sort;
      head.setAttribute("aria-sort", isSorted ? (descending ? "descending" : "ascending") : "none");
    });
    this.redraw();
  }

  redraw() {
    this.#drawn = "";
    this.#draw();
  }

  #draw() {
    const first = Math.max(0, Math.floor(this.element.scrollTop / ROW_PX) - SPARE);
    const last = Math.min(this.#shown.length, first + Math.ceil(this.element.clientHeight / ROW_PX) + 2 * SPARE);
    if (this.#drawn === `${first} ${last}`) return;
    this.#drawn = `${first} ${last}`;
    const hasFocus = this.body.contains(document.activeElement);
    const rows = [];
    for (let index = first; index < last; index += 1) rows.push(this.#row(this.#shown[index], index));
    this.body.replaceChildren(this.#space(first), ...rows, this.#space(this.#shown.length - last));
    if (hasFocus) this.#focused()?.focus({ preventScroll: true });
  }

  #space(rows) {
    return h("tr", { "aria-hidden": "true", style: { height: `${rows * ROW_PX}px` } });
  }

  #row(row, index) {
    const cells = this.columns.map((column, at) => {
      const content = column.cell(row);
      const tabindex = index === this.#current ? 0 : -1;
      const inside = at === 0 ? h("a", { href: this.place(row), tabindex, "data-index": index }, content) : content;
      return h("td", { class: column.kind }, inside);
    });
    return h(
      "tr",
      {
        "aria-rowindex": index + 2,
        onclick: (event) => {
          if (!event.target.closest("a")) location.hash = this.place(row);
        },
      },
      cells,
    );
  }

  #focused() {
    return this.body.querySelector(`a[data-index="${this.#current}"]`);
  }

  #key(event) {
    const page = Math.max(1, Math.floor(this.element.clientHeight / ROW_PX) - 2);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    const step = steps[event.key];
    if (step === undefined) return;
    event.preventDefault();
    this.#current = Math.max(0, Math.min(this.#shown.length - 1, this.#current + step));
    const top = this.#current * ROW_PX;
    const room = this.element.clientHeight - 2 * ROW_PX;
    if (top < this.element.scrollTop) this.element.scrollTop = top;
    else if (top > this.element.scrollTop + room) this.element.scrollTop = top - room;
    this.redraw();
    this.#focused()?.focus({ preventScroll: true });
  }
}
