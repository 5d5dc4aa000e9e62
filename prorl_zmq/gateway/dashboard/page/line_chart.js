// Lines over the steps of a training, with one scale; the value at the pointer, or at the step chosen by the arrow keys,
// is written above.

import { h, svg } from "./dom.js";
import { NOTHING, number } from "./format.js";

const WIDTH = 600;
const HEIGHT = 110;

// `lines` are [name, class, values], a value per step, or null; `told` writes a value. `top` is the least that the scale
// reaches. `chosen` is a step, `onchoose` gets another one.
export function lineChart(title, lines, told, { top = 0, chosen, onchoose }) {
  const count = Math.max(...lines.map(([, , values]) => values.length));
  const known = lines.flatMap(([, , values]) => values).filter((value) => value != null);
  const low = Math.min(0, ...known);
  const high = niceTop(Math.max(top, ...known), low);
  const x = (index) => (count > 1 ? (WIDTH * index) / (count - 1) : WIDTH / 2);
  const y = (value) => HEIGHT - (HEIGHT * (value - low)) / (high - low);
  const at = Math.min(chosen ?? count - 1, count - 1);
  const place = (event) => {
    const { left, width } = event.currentTarget.getBoundingClientRect();
    return Math.min(count - 1, Math.max(0, Math.round(((event.clientX - left) / width) * (count - 1))));
  };
  return h(
    "figure",
    { class: "lines" },
    h(
      "figcaption",
      null,
      h("b", null, title),
      lines.map(([name, kind, values]) =>
        h("span", { class: "small" }, h("i", { class: `dot ${kind}` }), `${name} `, h("b", null, valueAt(values, at, told))),
      ),
    ),
    h(
      "div",
      { class: "plot" },
      h("span", { class: "top-value small quiet" }, told(high)),
      svg(
        "svg",
        {
          viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
          preserveAspectRatio: "none",
          role: "img",
          "aria-label": `${title} over ${number(count, "step")}; the table below has the values`,
          onpointermove: (event) => onchoose(place(event)),
          onpointerdown: (event) => onchoose(place(event)),
        },
        svg("line", { class: "rule", x1: 0, x2: WIDTH, y1: 0.5, y2: 0.5 }),
        svg("line", { class: "rule base", x1: 0, x2: WIDTH, y1: y(0), y2: y(0) }),
        svg("line", { class: "rule at", x1: x(at), x2: x(at), y1: 0, y2: HEIGHT }),
        lines.map(([, kind, values]) => pathOf(values, kind, x, y)),
      ),
    ),
  );
}

const valueAt = (values, at, told) => (values[at] == null ? NOTHING : told(values[at]));

// Where a value is missing the line breaks; a value alone is a point.
function pathOf(values, kind, x, y) {
  const parts = [];
  values.forEach((value, index) => {
    if (value == null) return;
    const isFirst = values[index - 1] == null;
    parts.push(`${isFirst ? "M" : "L"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`);
    if (isFirst && values[index + 1] == null) parts.push("h0.01");
  });
  return svg("path", { class: `line ${kind}`, d: parts.join(" ") });
}

function niceTop(most, low) {
  if (most <= low) return low + 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 1.5, 2, 3, 5, 7.5, 10].map((factor) => factor * power).find((each) => each >= most * 0.9999);
}
