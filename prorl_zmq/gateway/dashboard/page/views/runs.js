// Finished evaluations: those that are chosen stand side by side. The first one is what the others are compared with.

import { ApiError, get, part } from "../api.js";
import { card, h, redraw, table } from "../dom.js";
import { clock, count, NOTHING, percent } from "../format.js";
import { comparison } from "../comparison.js";

const MOST = 6;

export function runs({ query }) {
  const list = h("div");
  const side = h("div", { "aria-live": "polite" });
  const element = h("div", null, h("h1", null, "Runs"), list, side);
  let chosen = query.getAll("run");
  let known = null;
  const figures = new Map();
  const pairs = new Map();

  async function load() {
    try {
      known = await get("/v1/runs");
      if (!chosen.length)
        chosen = known.runs
          .slice(0, 2)
          .map((run) => run.run)
          .reverse();
      draw();
      await compare();
    } catch (error) {
      fail(error);
    }
  }

  async function compare() {
    const wanted = [...chosen];
    try {
      for (const run of wanted) if (!figures.has(run)) figures.set(run, await get(`/v1/runs/figures?run=${part(run)}`));
      for (const other of wanted.slice(1)) {
        const place = `run=${part(wanted[0])}&other=${part(other)}`;
        if (!pairs.has(place)) pairs.set(place, await get(`/v1/runs/comparison?${place}`));
      }
    } catch (error) {
      return fail(error);
    }
    if (wanted.join("\n") === chosen.join("\n"))
      redraw(
        side,
        wanted.length
          ? comparison(
              wanted.map((run) => figures.get(run)),
              wanted.slice(1).map((other) => pairs.get(`run=${part(wanted[0])}&other=${part(other)}`)),
            )
          : null,
      );
  }

  function fail(error) {
    if (!(error instanceof ApiError)) throw error;
    redraw(side, h("p", { class: "note bad", role: "alert" }, error.message));
  }

  function choose(run, isWanted) {
    chosen = isWanted ? [...chosen, run].slice(-MOST) : chosen.filter((each) => each !== run);
    history.replaceState(null, "", `#/runs?${new URLSearchParams(chosen.map((each) => ["run", each]))}`);
    draw();
    compare();
  }

  function draw() {
    if (!known.folder) {
      redraw(
        list,
        h(
          "p",
          { class: "note" },
          'No folder of runs was named: prorl dashboard --runs DIR, or runs = "DIR" below [dashboard] of the topology.',
        ),
      );
      return;
    }
    const columns = [
      ["", ""],
      ["run", "id"],
      ["pass@1", "number"],
      ["rollouts", "number"],
      ["samples", "number"],
      ["changed", "number"],
      ["data"],
      ["model", "text"],
    ];
    const rows = known.runs.map((run) => [
      h("input", {
        type: "checkbox",
        "aria-label": `Compare ${run.run}`,
        "data-key": `choose ${run.run}`,
        checked: chosen.includes(run.run),
        onchange: (event) => choose(run.run, event.target.checked),
      }),
      run.run,
      percent(run.passes.find((row) => row.k === 1)?.estimate?.value),
      run.passes.length
        ? `${count(run.ended)} of ${count(run.plan.problems * run.plan.settings.samples)}`
        : "no summary yet",
      count(run.plan.settings.samples),
      clock(run.changed_at),
      run.plan.file.split("/").at(-1),
      run.models.join(", ") || run.plan.settings.model || NOTHING,
    ]);
    redraw(
      list,
      card(
        "Evaluations",
        { class: "run-list" },
        table("Evaluations", columns, rows, `No folder of prorl eval is in ${known.folder}.`),
      ),
    );
  }

  load();
  return { element, title: "Runs", close() {}, update() {} };
}
