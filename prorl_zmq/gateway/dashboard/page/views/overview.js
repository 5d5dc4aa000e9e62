// How the whole service stands: what needs a look, the stages, what ended, engines, and open batches.

import { endedWithin, OUTCOMES, outcomeLegend, outcomesOverTime, SPANS } from "../charts.js";
import { badge, bar, card, choice, figure, h, link, redraw, table } from "../dom.js";
import { clock, compact, count, percent, rate, seconds, shortId, words } from "../format.js";
import { store } from "../store.js";
import { backendRows, BACKEND_COLUMNS } from "./backends.js";
import { batchRows, BATCH_COLUMNS } from "./batches.js";

const PHASES = ["init", "run", "eval", "score"];
const LATEST = 8;
let span = 600; // seconds of the chart

export function overview() {
  const element = h("div", { class: "overview" });
  return {
    element,
    title: "Overview",
    close() {},
    update,
  };

  function update() {
    redraw(element, h("h1", { class: "hidden" }, "Overview"), content(update));
  }
}

function content(update) {
  const { overview: seen } = store;
  if (!seen)
    return h(
      "p",
      { class: store.state === "refused" ? "note bad" : "note", role: "status" },
      store.why || "Asking the service …",
    );
  const { status, backends } = seen;
  return [
    attention(seen),
    status
      ? [
          stages(status),
          h(
            "div",
            { class: "columns wide-first" },
            lately(seen, update),
            h("section", { class: "card figures-card" }, h("h2", null, "In all"), totals(seen)),
          ),
        ]
      : null,
    backends
      ? card(
          link("#/backends", { class: "h2" }, "Backends"),
          null,
          table("Backends", BACKEND_COLUMNS, backendRows(backends), "No backend has registered."),
        )
      : null,
    status
      ? card(
          link("#/batches", { class: "h2" }, "Open batches"),
          null,
          table("Open batches", BATCH_COLUMNS, batchRows(status.batches), "No batch is open."),
        )
      : null,
    status ? latestFailures() : null,
  ];
}

function lately({ ended, at }, update) {
  const shown = endedWithin(ended, at, span);
  return card(
    h("h2", { class: "tools" }, "Ended in the last", choice("Time of the chart", SPANS, span, choose)),
    null,
    outcomesOverTime(shown, at, span),
    outcomeLegend(sum(shown), (name) => `#/jobs?q=state:${name}`),
  );

  function choose(seconds) {
    span = Number(seconds);
    update();
  }
}

// What somebody should look at now, if anything.
function attention({ problems, backends, nodes, status }) {
  const lines = Object.entries(problems).map(([name, why]) => [name, why, "#/"]);
  for (const { backend, state, problem } of backends?.backends ?? []) {
    if (["unwell", "probation", "behind"].includes(state))
      lines.push([`backend ${backend.backend_id}`, `${state}: ${problem}`, "#/backends"]);
  }
  for (const { backend_id: id, state, problem } of backends?.starts ?? []) {
    if (state === "failed") lines.push([`engine ${id}`, `did not start: ${problem}`, "#/backends"]);
  }
  for (const { node, state, silent_s: silent } of nodes) {
    if (state === "silent" || state === "lost")
      lines.push([`node ${node}`, `${state} for ${seconds(silent)}`, "#/nodes"]);
  }
  for (const { batch_id: id, state, problem } of status?.batches ?? []) {
    if (state === "failed") lines.push([`batch ${id}`, problem, `#/batches/${encodeURIComponent(id)}`]);
  }
  if (backends && !backends.backends.length && backends.waiting)
    lines.push(["backends", `${backends.waiting} jobs wait, and there is none`, "#/backends"]);
  return lines.length
    ? h(
        "ul",
        { class: "note warn attention", role: "alert" },
        lines.map(([name, why, place]) =>
          h("li", null, link(place, { "data-key": `attention ${name}` }, name), " ", why),
        ),
      )
    : null;
}

function stages(status) {
  return h(
    "div",
    { class: "stages" },
    PHASES.filter((phase) => phase !== "score" || status.stages.some((stage) => stage.role === phase)).map((phase) => {
      const own = status.stages.filter((stage) => stage.role === phase);
      const slots = own.reduce((all, stage) => all + stage.slots, 0);
      const busy = status.running[phase] ?? 0;
      const queued = status.queued[phase] ?? 0;
      return h(
        "section",
        { class: "card stage" },
        h(
          "h2",
          null,
          phase.toUpperCase(),
          h("span", { class: "quiet small" }, own.length === 1 ? "1 process" : `${own.length} processes`),
        ),
        h(
          "div",
          { class: "pair" },
          link(
            `#/jobs?q=state:${phase}`,
            { class: "figure" },
            h("b", null, count(busy)),
            h("span", { class: "quiet small" }, `of ${count(slots)} slots`),
          ),
          h(
            "div",
            { class: "figure" },
            h("b", { class: queued ? "waiting" : "" }, count(queued)),
            h("span", { class: "quiet small" }, "queued"),
          ),
        ),
        bar([[busy, `part-${phase}`]], slots, `${busy} of ${slots} slots of ${phase} are busy`),
      );
    }),
  );
}

function totals({ status, ended_per_s: rateNow, brokers }) {
  const all = OUTCOMES.reduce((total, name) => total + (status.outcomes[name] ?? 0), 0);
  return h(
    "div",
    { class: "figures" },
    figure("throughput", `${rate(rateNow)} /s`, "of the last 30 s"),
    figure("jobs ended", compact(all), `${percent(all ? (status.outcomes.completed ?? 0) / all : null, 0)} completed`),
    figure("uncollected", compact(status.uncollected), "results"),
    figure("redelivered", compact(status.redelivered), "phases"),
    figure(
      "up for",
      seconds(status.uptime_s),
      Object.keys(brokers).length > 1 ? `${Object.keys(brokers).length} brokers` : "",
    ),
  );
}

function latestFailures() {
  const failed = [];
  for (const row of store.rows.values())
    if (row.outcome && row.outcome !== "completed" && row.outcome !== "cancelled") failed.push(row);
  failed.sort((one, other) => other.ended_at - one.ended_at);
  const columns = [["outcome"], ["error"], ["job", "id"], ["ended", ""], ["task"], ["node"]];
  return card(
    "Latest failures",
    null,
    table(
      "Latest failures",
      columns,
      failed
        .slice(0, LATEST)
        .map((row) => [
          badge(row.outcome, words(row.outcome)),
          row.code,
          link(`#/jobs/${encodeURIComponent(row.job_id)}`, null, shortId(row.job_id)),
          clock(row.ended_at),
          row.task,
          row.node,
        ]),
      "None that is known.",
    ),
  );
}

function sum(ended) {
  const whole = {};
  for (const { outcomes } of ended)
    for (const [name, number] of Object.entries(outcomes)) whole[name] = (whole[name] ?? 0) + number;
  return whole;
}
