// Where each second of a job went: its queues and phases, attempt by attempt, and below RUN its steps, turn by turn.

import { badge, h, redraw, table } from "./dom.js";
import { NOTHING, seconds, words } from "./format.js";
import { Zoom } from "./zoom.js";

const TICKS = 6;

export const toolOf = (name) => (name.startsWith("tool.") ? "tool" : name === "engine" ? "engine" : "other");

export class Timeline {
  #zoom = new Zoom(() => this.#draw());
  #trace = null;
  #steps = [];
  #buttons = h("div");
  #lanes = h("div", {
    class: "zoomed",
    tabindex: 0,
    role: "group",
    "aria-label": "Time line: plus and minus zoom, the arrows move, 0 shows all",
    ...this.#zoom.listeners(() => this.#lanes.querySelector(".axis .lane-room").getBoundingClientRect()),
  });
  #below = h("div");
  element = h("div", { class: "timeline" }, this.#buttons, this.#lanes, this.#below);

  // `trace` as the broker tells it; `steps` of the result, each [name, turn, start_s after RUN began, seconds, tokens].
  update(trace, steps) {
    this.#trace = trace;
    this.#steps = steps;
    this.#draw();
  }

  #draw() {
    if (this.#zoom.drawing) return;
    const [trace, steps] = [this.#trace, this.#steps];
    const end = Math.max(...trace.spans.map((span) => span.end_s ?? trace.age_s), trace.ended_s ?? 0, 0.001);
    redraw(this.#lanes, lanesOf(trace, steps, end, this.#zoom.window(end)), h("i", { class: "drawn" }));
    redraw(this.#buttons, this.#zoom.buttons());
    redraw(this.#below, legend(trace, steps.length > 0), losses(trace), stays(trace));
  }
}

function lanesOf(trace, steps, end, shown) {
  const attempts = [...new Set(trace.spans.map((span) => span.attempt))];
  const lanes = attempts.map((attempt) => {
    const spans = trace.spans.filter((span) => span.attempt === attempt);
    return lane(
      `attempt ${attempt}`,
      spans.map((span) => phaseBar(span, trace, shown)),
    );
  });
  const run = trace.spans.findLast((span) => span.phase === "run" && span.place === "held");
  const turns = new Map();
  for (const step of run ? steps : []) {
    const [, turn] = step;
    turns.set(turn, [...(turns.get(turn) ?? []), step]);
  }
  for (const [turn, ofTurn] of turns) {
    lanes.push(
      lane(
        turn ? `turn ${turn}` : "prompt",
        ofTurn.map((step) => stepBar(step, run.start_s, shown)),
      ),
    );
  }
  const restarts = trace.restarts
    .filter((at) => at >= shown[0] && at <= shown[1])
    .map((at) =>
      h("i", {
        class: "restart",
        style: { left: `${100 * placeOf(at, shown)}%` },
        title: `the broker was restarted after ${seconds(at)}`,
      }),
    );
  return h(
    "div",
    { class: "lanes", role: "img", "aria-label": `Time line of ${seconds(end)}; the table below has its times` },
    axis(shown),
    lanes,
    restarts.length ? lane("restarts", restarts) : null,
  );
}

const placeOf = (at, [from, to]) => (at - from) / (to - from);

function lane(name, bars) {
  return h("div", { class: "lane" }, h("span", { class: "lane-name" }, name), h("div", { class: "lane-room" }, bars));
}

function axis(shown) {
  const [from, to] = shown;
  const rough = (to - from) / TICKS;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
  const ticks = [];
  for (let index = Math.ceil(from / step); index * step <= from + (to - from) * 0.97; index += 1) {
    const at = index * step;
    ticks.push(h("span", { class: "tick", style: { left: `${100 * placeOf(at, shown)}%` } }, at ? fine(at, step) : "0"));
  }
  return h("div", { class: "lane axis" }, h("span", { class: "lane-name" }), h("div", { class: "lane-room" }, ticks));
}

// A time with as many digits as the step from one to the next needs.
function fine(at, step) {
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  if (at < 1 || (at < 60 && digits <= 1) || !digits) return seconds(at);
  const minutes = Math.floor(at / 60);
  return `${minutes ? `${minutes} m ` : ""}${(at % 60).toFixed(digits)} s`;
}

function block(kind, start, length, shown, title, text) {
  const begin = Math.max(start, shown[0]);
  const finish = Math.min(start + length, shown[1]);
  if (finish < begin) return null;
  const width = 100 * (placeOf(finish, shown) - placeOf(begin, shown));
  return h(
    "span",
    { class: `block ${kind}`, title, style: { left: `min(${100 * placeOf(begin, shown)}%, 100% - 4px)`, width: `max(4px, ${width}%)` } },
    width > 7 ? text : null,
  );
}

function phaseBar(span, trace, shown) {
  const length = (span.end_s ?? trace.age_s) - span.start_s;
  const name = span.place === "queued" ? `queue of ${span.phase}` : span.phase;
  const kind = `${span.place === "queued" ? "queue" : span.phase}${span.error ? " bad" : ""}${span.end_s == null ? " open" : ""}`;
  const text = span.place === "queued" ? "queue" : span.phase.toUpperCase();
  return block(
    kind,
    span.start_s,
    length,
    shown,
    `${name}: ${seconds(length)}${span.node ? ` on ${span.node}` : ""}`,
    text,
  );
}

function stepBar([name, turn, start, length], runStart, shown) {
  return block(
    toolOf(name),
    runStart + start,
    length,
    shown,
    `turn ${turn}, ${name}: ${seconds(length)}`,
    name.replace("tool.", ""),
  );
}

function legend(trace, hasSteps) {
  const parts = [
    ["queue", "queue"],
    ["init", "INIT"],
    ["run", "RUN"],
    ["eval", "EVAL"],
    ...(trace.spans.some((span) => span.phase === "score") ? [["score", "SCORE"]] : []),
    ...(hasSteps
      ? [
          ["engine", "engine"],
          ["tool", "tool"],
          ["other", "other steps"],
        ]
      : []),
  ];
  return h(
    "p",
    { class: "legend", "aria-hidden": "true" },
    parts.map(([kind, name]) => h("span", null, h("i", { class: `block ${kind}` }), name)),
  );
}

function losses(trace) {
  const spans = trace.spans.filter((span) => span.error);
  return spans.length
    ? h(
        "ul",
        { class: "losses" },
        spans.map((span) =>
          h(
            "li",
            null,
            h("b", null, `attempt ${span.attempt}, ${span.phase.toUpperCase()}: `),
            badge("failed", words(span.error.code)),
            " ",
            span.error.message,
          ),
        ),
      )
    : null;
}

function stays(trace) {
  const rows = trace.spans.map((span) => [
    span.attempt,
    span.place === "queued" ? `queue of ${span.phase.toUpperCase()}` : span.phase.toUpperCase(),
    seconds(span.start_s),
    seconds((span.end_s ?? trace.age_s) - span.start_s),
    span.node || NOTHING,
    span.stage_id || NOTHING,
    span.backends.join(", ") || NOTHING,
    span.error ? words(span.error.code) : span.end_s == null ? "now" : "",
  ]);
  const columns = [
    ["attempt", "number"],
    ["stay"],
    ["from", "number"],
    ["for", "number"],
    ["node"],
    ["stage process"],
    ["backend"],
    ["ended by"],
  ];
  return h(
    "details",
    { "data-key": "stays" },
    h("summary", null, "Times as a table"),
    table("Times of the job", columns, rows),
  );
}
