// Where each second of a job went: its queues and phases, attempt by attempt, and below RUN its steps, turn by turn.

import { badge, h, table } from "./dom.js";
import { NOTHING, seconds, words } from "./format.js";

const TICKS = 6;

export const toolOf = (name) => (name.startsWith("tool.") ? "tool" : name === "engine" ? "engine" : "other");

// `trace` as the broker tells it; `steps` of the result, each [name, turn, start_s after RUN began, seconds].
export function timeline(trace, steps) {
  const end = Math.max(...trace.spans.map((span) => span.end_s ?? trace.age_s), trace.ended_s ?? 0, 0.001);
  const attempts = [...new Set(trace.spans.map((span) => span.attempt))];
  const lanes = attempts.map((attempt) => {
    const spans = trace.spans.filter((span) => span.attempt === attempt);
    return lane(
      `attempt ${attempt}`,
      spans.map((span) => phaseBar(span, trace, end)),
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
        ofTurn.map((step) => stepBar(step, run.start_s, end)),
      ),
    );
  }
  const restarts = trace.restarts
    .filter((at) => at <= end)
    .map((at) =>
      h("i", {
        class: "restart",
        style: { left: `${(100 * at) / end}%` },
        title: `the broker was restarted after ${seconds(at)}`,
      }),
    );
  return h(
    "div",
    { class: "timeline" },
    h(
      "div",
      { class: "lanes", role: "img", "aria-label": `Time line of ${seconds(end)}; the table below has its times` },
      axis(end),
      lanes,
      restarts.length ? lane("restarts", restarts) : null,
    ),
    legend(steps.length > 0),
    losses(trace),
    stays(trace),
  );
}

function lane(name, bars) {
  return h("div", { class: "lane" }, h("span", { class: "lane-name" }, name), h("div", { class: "lane-room" }, bars));
}

function axis(end) {
  const rough = end / TICKS;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
  const ticks = [];
  for (let at = 0; at <= end * 0.97; at += step) {
    ticks.push(h("span", { class: "tick", style: { left: `${(100 * at) / end}%` } }, at ? seconds(at) : "0"));
  }
  return h("div", { class: "lane axis" }, h("span", { class: "lane-name" }), h("div", { class: "lane-room" }, ticks));
}

function block(kind, start, length, end, title, text) {
  const width = (100 * length) / end;
  return h(
    "span",
    { class: `block ${kind}`, title, style: { left: `min(${(100 * start) / end}%, 100% - 4px)`, width: `max(4px, ${width}%)` } },
    width > 7 ? text : null,
  );
}

function phaseBar(span, trace, end) {
  const length = (span.end_s ?? trace.age_s) - span.start_s;
  const name = span.place === "queued" ? `queue of ${span.phase}` : span.phase;
  const kind = `${span.place === "queued" ? "queue" : span.phase}${span.error ? " bad" : ""}${span.end_s == null ? " open" : ""}`;
  const text = span.place === "queued" ? "queue" : span.phase.toUpperCase();
  return block(
    kind,
    span.start_s,
    length,
    end,
    `${name}: ${seconds(length)}${span.node ? ` on ${span.node}` : ""}`,
    text,
  );
}

function stepBar([name, turn, start, length], runStart, end) {
  return block(
    toolOf(name),
    runStart + start,
    length,
    end,
    `turn ${turn}, ${name}: ${seconds(length)}`,
    name.replace("tool.", ""),
  );
}

function legend(hasSteps) {
  const parts = [
    ["queue", "queue"],
    ["init", "INIT"],
    ["run", "RUN"],
    ["eval", "EVAL"],
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
