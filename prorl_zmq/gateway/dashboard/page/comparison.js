// Evaluations side by side: pass@k with intervals, failures by reason, and the problems whose result changed.

import { ApiError, get, part } from "./api.js";
import { interval } from "./charts.js";
import { card, h, link, table } from "./dom.js";
import { count, NOTHING, percent, reward, seconds, visible, words } from "./format.js";

const SHOWN_PROBLEMS = 300;
const SHOWN_REASONS = 15;

// `pairs` compare the first run with each of the others.
export function comparison(runs, pairs) {
  return [settings(runs, pairs), paired(pairs), head(runs), passes(runs), failures(runs), problems(runs)];
}

const kindOf = (index) => `series-${index}`;
const names = (runs) =>
  runs.map(({ run }, index) => [h("span", null, h("i", { class: `dot ${kindOf(index)}` }), run), "number"]);

function settings(runs, pairs) {
  if (!pairs.length) return null;
  const rows = new Map();
  pairs.forEach(({ comparison: found }, index) =>
    found.settings.forEach(({ name, first, second }) => {
      const values = rows.get(name) ?? runs.map(() => first);
      values[index + 1] = second;
      rows.set(name, values);
    }),
  );
  const cells = [...rows].map(([name, values]) => [name, ...values.map((value) => h("span", { class: "wrap" }, value))]);
  const columns = [["setting", "text"], ...names(runs).map(([title]) => [title, "text"])];
  return card("Settings that differ", null, table("Settings that differ", columns, cells, "None: all are equal."));
}

function paired(pairs) {
  if (!pairs.length) return null;
  const rows = pairs.map(({ run, other, comparison: found }) => [
    h("span", { class: "wrap" }, `${run} → ${other}`),
    found.p_value == null ? NOTHING : h("span", { title: testOf(found) }, Number(found.p_value.toPrecision(2)).toString()),
    points(found.difference),
    count(found.shared),
    count(found.solved_by_both),
    count(found.solved_by_first),
    count(found.solved_by_second),
    count(found.solved_by_none),
  ]);
  const columns = [
    ["runs", "text"],
    ["p", "number"],
    ["difference in points, 95 %", "number"],
    ["shared", "number"],
    ["both", "number"],
    ["only first", "number"],
    ["only second", "number"],
    ["none", "number"],
  ];
  const tests = [...new Set(pairs.map(({ comparison: found }) => testOf(found)))].join("; ");
  return card(
    "Problems that were solved at least once",
    null,
    table("Solved by both, one, none", columns, rows),
    h("p", { class: "quiet small" }, `p: ${tests}, over the problems with a rollout that counts in both runs.`),
  );
}

const testOf = (found) => (found.one_sample ? "McNemar’s exact test" : "exact sign-flip test");

function points(estimate) {
  if (!estimate) return NOTHING;
  const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(100 * value).toFixed(1)}`;
  return `${signed(estimate.value)} (${signed(estimate.low)} to ${signed(estimate.high)})`;
}

function head(runs) {
  const rows = [
    ["model", ...runs.map(({ summary }) => summary.models.join(", ") || NOTHING)],
    ["problems × samples", ...runs.map(({ plan }) => `${count(plan.problems)} × ${count(plan.settings.samples)}`)],
    ["rollouts that ended", ...runs.map(({ summary }) => count(summary.ended))],
    ["left out: infrastructure", ...runs.map(({ summary }) => count(summary.infrastructure_errors))],
    ["mean reward", ...runs.map(({ summary }) => (summary.reward ? reward(summary.reward.value) : NOTHING))],
    [
      "generated tokens per rollout",
      ...runs.map(({ summary }) => count(summary.tokens.find((row) => row.name === "generated_tokens")?.mean)),
    ],
    [
      "seconds of RUN, median",
      ...runs.map(({ summary }) => seconds(summary.times.find((row) => row.name === "run")?.p50)),
    ],
  ];
  return card("Side by side", null, table("Side by side", [["", "text"], ...names(runs)], rows));
}

function passes(runs) {
  const ks = [...new Set(runs.flatMap(({ summary }) => summary.passes.map((row) => row.k)))].sort(
    (one, other) => one - other,
  );
  return card(
    "pass@k with 95 % intervals, from 0 to 100 %",
    null,
    h(
      "div",
      { class: "intervals" },
      ks.map((k) =>
        h(
          "div",
          { class: "of-k" },
          h("h3", null, `pass@${k}`),
          runs.map(({ run, summary }, index) => {
            const estimate = summary.passes.find((row) => row.k === k)?.estimate;
            return h(
              "div",
              { class: "of-run" },
              h("span", { class: "run-name", title: run }, run),
              interval(estimate, kindOf(index)),
              h(
                "span",
                null,
                h("b", null, percent(estimate?.value)),
                estimate
                  ? h(
                      "span",
                      { class: "quiet small" },
                      ` ${(100 * estimate.low).toFixed(1)} to ${percent(estimate.high)}`,
                    )
                  : null,
              ),
            );
          }),
        ),
      ),
    ),
  );
}

function failures(runs) {
  const reasons = new Map();
  runs.forEach(({ summary }, index) =>
    summary.failures.forEach((row) => {
      const why = [row.code, row.stop_reason].filter(Boolean).map(words).join(", ");
      const reason = `${row.outcome === "completed" ? "not solved" : words(row.outcome)}${why ? `: ${why}` : ""}`;
      const counts = reasons.get(reason) ?? runs.map(() => [0, 0]);
      counts[index] = [row.count, row.share];
      reasons.set(reason, counts);
    }),
  );
  const most = ([, counts]) => Math.max(...counts.map(([number]) => number));
  const rows = [...reasons]
    .sort((one, other) => most(other) - most(one))
    .slice(0, SHOWN_REASONS)
    .map(([reason, counts]) => [
      reason,
      ...counts.map(([number, share]) => (number ? `${count(number)}  (${percent(share, 0)})` : NOTHING)),
    ]);
  return card("Failures by reason", null, table("Failures by reason", [["reason", "text"], ...names(runs)], rows));
}

// A problem's name, which shows its text when it is opened.
function asked(name, run) {
  const text = h("p", { class: "asked" }, "…");
  const load = async () => {
    try {
      const found = await get(`/v1/runs/rollouts?run=${part(run)}&problem=${part(name)}`);
      text.replaceChildren(visible(found.text || "No rollout has kept its texts."));
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      text.replaceChildren(visible(error.message));
    }
  };
  const opened = (event) => event.target.open && load();
  return h("details", { "data-key": `problem ${name}`, ontoggle: opened }, h("summary", null, name), text);
}

function problems(runs) {
  const found = new Map();
  runs.forEach(({ summary }, index) =>
    summary.problems.forEach((row) => {
      const cells = found.get(row.name) ?? runs.map(() => null);
      cells[index] = row;
      found.set(row.name, cells);
    }),
  );
  const share = (row) => (row?.samples ? row.solved / row.samples : null);
  const rows = [...found].map(([name, cells]) => {
    const shares = cells.map(share);
    const known = shares.filter((each) => each != null);
    return {
      name,
      cells,
      spread: known.length > 1 ? Math.max(...known) - Math.min(...known) : 0,
      change: (shares.at(-1) ?? 0) - (shares[0] ?? 0),
    };
  });
  const changed = rows.filter((row) => row.spread > 0).sort((one, other) => one.change - other.change);
  const isAlone = runs.length < 2;
  const shown = (isAlone ? rows : changed).slice(0, SHOWN_PROBLEMS);
  const columns = [["problem", "text"], ...names(runs), ...(isAlone ? [] : [["change", "number"]])];
  const cells = shown.map(({ name, cells: ofRuns, change }) => [
    asked(name, runs[ofRuns.findIndex(Boolean)].run),
    ...ofRuns.map((row, index) =>
      row ? link(`#/runs/${part(runs[index].run)}/${part(name)}`, null, `${row.solved} of ${row.samples}`) : NOTHING,
    ),
    ...(isAlone
      ? []
      : [
          h(
            "span",
            { class: change < 0 ? "worse" : change > 0 ? "better" : "quiet" },
            `${change > 0 ? "▲ +" : change < 0 ? "▼ −" : ""}${percent(Math.abs(change), 0)}`,
          ),
        ]),
  ]);
  const better = changed.filter((row) => row.change > 0).length;
  const worse = changed.filter((row) => row.change < 0).length;
  const told = isAlone
    ? ""
    : `Of ${count(rows.length)} problems ${count(worse)} became worse and ${count(better)} better from the first run to the last.`;
  return card(
    isAlone ? "Problems" : "Problems that changed",
    null,
    told ? h("p", { class: "quiet" }, told) : null,
    table("Problems", columns, cells, isAlone ? "None." : "None: each was solved as often in all runs."),
    (isAlone ? rows : changed).length > shown.length
      ? h(
          "p",
          { class: "quiet small" },
          `${count((isAlone ? rows : changed).length - shown.length)} more are not shown.`,
        )
      : null,
  );
}
