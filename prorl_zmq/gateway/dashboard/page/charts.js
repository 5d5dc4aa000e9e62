// Small charts as SVG: outcomes over time, and intervals on a common scale.

import { h, svg } from "./dom.js";
import { clock, count, percent, words } from "./format.js";

export const OUTCOMES = ["completed", "failed", "timeout", "infrastructure_error", "cancelled"];
const WIDTH = 600;
const HEIGHT = 120;
const MINUTE = 60;
export const SPANS = { 600: "10 minutes", 3600: "hour" }; // by seconds

// What ended in the last seconds, `ended` of the overview: of a long span, by the minute.
export function endedWithin(ended, now, span) {
  if (span <= 600) return ended.filter(({ at, seconds }) => at + seconds > now - span);
  const minutes = new Map();
  for (const { at, outcomes } of ended) {
    const start = at - (at % MINUTE);
    const sums = minutes.get(start) ?? {};
    for (const [name, number] of Object.entries(outcomes)) sums[name] = (sums[name] ?? 0) + number;
    minutes.set(start, sums);
  }
  return [...minutes].map(([at, outcomes]) => ({ at, seconds: MINUTE, outcomes }));
}

// How many jobs ended in each interval of so many seconds until `now`.
export function outcomesOverTime(ended, now, span) {
  const totals = ended.map(({ outcomes }) => OUTCOMES.reduce((sum, name) => sum + (outcomes[name] ?? 0), 0));
  const most = niceTop(Math.max(...totals, 1));
  const bars = ended.map(({ at, seconds, outcomes }) => {
    const left = WIDTH - (WIDTH * (now - at)) / span;
    const whole = (WIDTH * Math.min(seconds, Math.max(now - at, 1))) / span;
    const width = Math.max(whole - 2, 1);
    let top = HEIGHT;
    const parts = OUTCOMES.filter((name) => outcomes[name]).map((name) => {
      const height = (HEIGHT * outcomes[name]) / most;
      top -= height;
      return svg("rect", { class: `fill-${name.replace("_", "-")}`, x: left + 1, y: top, width, height });
    });
    const told = OUTCOMES.filter((name) => outcomes[name])
      .map((name) => `${outcomes[name]} ${words(name)}`)
      .join(", ");
    return svg(
      "g",
      null,
      svg("title", null, `${clock(at)}: ${told || "none ended"}`),
      svg("rect", { class: "touch", x: left, y: 0, width: whole, height: HEIGHT }),
      parts,
    );
  });
  const whole = Object.fromEntries(
    OUTCOMES.map((name) => [name, ended.reduce((sum, { outcomes }) => sum + (outcomes[name] ?? 0), 0)]),
  );
  const label = OUTCOMES.map((name) => `${count(whole[name])} ${words(name)}`).join(", ");
  return h(
    "figure",
    { class: "over-time" },
    h(
      "div",
      { class: "plot" },
      h("span", { class: "top-value small quiet" }, count(most)),
      svg(
        "svg",
        {
          viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
          preserveAspectRatio: "none",
          role: "img",
          "aria-label": `Ended in the last ${SPANS[span]}: ${label}`,
        },
        svg("line", { class: "rule", x1: 0, x2: WIDTH, y1: 0.5, y2: 0.5 }),
        svg("line", { class: "rule", x1: 0, x2: WIDTH, y1: HEIGHT / 2, y2: HEIGHT / 2 }),
        bars,
        svg("line", { class: "rule base", x1: 0, x2: WIDTH, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5 }),
      ),
    ),
    h("figcaption", { class: "small quiet" }, h("span", null, clock(now - span)), h("span", null, "now")),
  );
}

export function outcomeLegend(outcomes, place) {
  return h(
    "p",
    { class: "legend" },
    OUTCOMES.map((name) =>
      h(
        "a",
        { href: place(name), "data-key": `legend ${name}` },
        h("i", { class: `dot is-${name.replace("_", "-")}` }),
        `${words(name)} `,
        h("b", null, count(outcomes[name] ?? 0)),
      ),
    ),
  );
}

// An estimate with its interval, between 0 and 1.
export function interval(estimate, kind) {
  if (!estimate) return h("span", { class: "quiet" }, "–");
  const { value, low, high } = estimate;
  const label = `${percent(value)}, 95 % interval ${percent(low)} to ${percent(high)}`;
  return h(
    "span",
    { class: "interval", role: "img", "aria-label": label, title: label },
    h("i", { class: `reach ${kind}`, style: { left: `${100 * low}%`, width: `${100 * (high - low)}%` } }),
    h("i", { class: `value ${kind}`, style: { left: `${100 * value}%` } }),
  );
}

function niceTop(most) {
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= most);
}
