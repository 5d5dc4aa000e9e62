// Which part of a time line is shown, and what changes that: buttons, keys, the wheel with Ctrl (or two fingers), and a
// pointer that is drawn over a part of it.

import { h } from "./dom.js";
import { seconds } from "./format.js";

const FACTOR = 2;
const STEP = 0.25; // of what is shown
const LEAST = 1 / 20_000; // of the whole
const DRAWN_PX = 8;

export class Zoom {
  #end = 0;
  #part = null; // [from, to] in seconds; null: all, to the end
  #onchange;
  #drawn = null; // where a pointer went down, as a part of what is shown
  drawing = false;

  constructor(onchange) {
    this.#onchange = onchange;
  }

  // What is shown of so many seconds.
  window(end) {
    this.#end = end;
    return this.#part ?? [0, end];
  }

  // Draw it so many times larger; the place at a part of what is shown stays there.
  by(factor, at = 0.5) {
    const [from, to] = this.window(this.#end);
    const length = Math.max((to - from) / factor, this.#end * LEAST);
    this.show(from + (to - from) * at - length * at, length);
  }

  move(part) {
    const [from, to] = this.window(this.#end);
    this.show(from + (to - from) * part, to - from);
  }

  all() {
    this.show(0, this.#end);
  }

  show(from, length) {
    const start = Math.min(Math.max(0, from), Math.max(0, this.#end - length));
    this.#part = length >= this.#end ? null : [start, start + length];
    this.#onchange();
  }

  buttons() {
    const [from, to] = this.window(this.#end);
    const button = (sign, name, isOff, onclick) =>
      h(
        "button",
        {
          type: "button",
          "aria-label": name,
          title: name,
          "data-key": name,
          "aria-disabled": isOff ? "true" : null, // it keeps the focus
          onclick: () => isOff || onclick(),
        },
        sign,
      );
    return h(
      "div",
      { class: "tools zoom", role: "group", "aria-label": "Part of the time line" },
      button("+", "Zoom in", to - from <= this.#end * LEAST, () => this.by(FACTOR)),
      button("−", "Zoom out", !this.#part, () => this.by(1 / FACTOR)),
      button("‹", "Earlier", !from, () => this.move(-STEP)),
      button("›", "Later", !this.#part || to >= this.#end, () => this.move(STEP)),
      button("All", "Show all", !this.#part, () => this.all()),
      h("span", { class: "quiet small", role: "status" }, this.#part ? `${seconds(from)} to ${seconds(to)}` : ""),
    );
  }

  // What the element of the lanes listens to; `roomOf` returns the box that the time takes in it.
  listeners(roomOf) {
    const partOf = (event) => {
      const { left, width } = roomOf();
      return Math.min(Math.max((event.clientX - left) / width, 0), 1);
    };
    return {
      onkeydown: (event) => {
        const act = {
          "+": () => this.by(FACTOR),
          "=": () => this.by(FACTOR),
          "-": () => this.by(1 / FACTOR),
          ArrowLeft: () => this.move(-STEP),
          ArrowRight: () => this.move(STEP),
          0: () => this.all(),
        }[event.key];
        if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
        event.preventDefault();
        act();
      },
      onwheel: (event) => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        this.by(Math.exp(-event.deltaY / 200), partOf(event));
      },
      ondblclick: () => this.all(),
      onpointerdown: (event) => {
        if (event.button || event.clientX < roomOf().left) return;
        this.#drawn = partOf(event);
        this.drawing = true;
        event.currentTarget.setPointerCapture(event.pointerId);
      },
      onpointermove: (event) => {
        if (!this.drawing) return;
        const [low, high] = [this.#drawn, partOf(event)].sort((one, other) => one - other);
        const mark = event.currentTarget.querySelector(".drawn");
        const room = roomOf();
        mark.style.left = `${room.left - event.currentTarget.getBoundingClientRect().left + low * room.width}px`;
        mark.style.width = `${(high - low) * room.width}px`;
      },
      onpointerup: (event) => {
        if (!this.drawing) return;
        this.drawing = false;
        const [low, high] = [this.#drawn, partOf(event)].sort((one, other) => one - other);
        const [from, to] = this.window(this.#end);
        event.currentTarget.querySelector(".drawn").style.width = 0;
        if ((high - low) * roomOf().width >= DRAWN_PX)
          this.show(from + (to - from) * low, Math.max((to - from) * (high - low), this.#end * LEAST));
      },
      onpointercancel: () => {
        this.drawing = false;
        this.#onchange();
      },
    };
  }
}
