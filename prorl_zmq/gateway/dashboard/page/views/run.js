// One problem of an evaluation: its rollouts, and the one that is opened.

import { ApiError, get, part } from "../api.js";
import { badge, card, h, link, redraw, table } from "../dom.js";
import { count, reward, seconds, words } from "../format.js";
import { rollout } from "./job.js";

export function run({ path: [name, problem, jobId] }) {
  const list = h("div");
  const opened = h("div");
  const element = h(
    "div",
    { class: "job" },
    h("p", { class: "path" }, link(`#/runs?run=${part(name)}`, null, "Runs"), " / ", name),
    h("h1", null, problem),
    list,
    opened,
  );

  async function load() {
    try {
      const { rollouts, text } = await get(`/v1/runs/rollouts?run=${part(name)}&problem=${part(problem)}`);
      const current = jobId ?? rollouts[0]?.job_id;
      const columns = [
        ["rollout", "id"],
        ["outcome"],
        ["error"],
        ["reward", "number"],
        ["turns", "number"],
        ["tokens", "number"],
        ["took", "number"],
      ];
      redraw(
        list,
        text ? card("Problem", null, h("p", { class: "asked" }, text)) : null,
        card(
          "Rollouts",
          null,
          table(
            "Rollouts",
            columns,
            rollouts.map((row) => [
              link(
                `#/runs/${part(name)}/${part(problem)}/${part(row.job_id)}`,
                { "aria-current": row.job_id === current ? "true" : null },
                row.job_id,
              ),
              badge(row.outcome, words(row.outcome)),
              row.code,
              reward(row.reward),
              count(row.turns),
              count(row.tokens),
              seconds(row.seconds),
            ]),
          ),
        ),
      );
      if (current)
        redraw(opened, rollout(await get(`/v1/runs/view?run=${part(name)}&job_id=${part(current)}`)));
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      redraw(opened, h("p", { class: "note bad", role: "alert" }, error.message));
    }
  }

  load();
  return { element, title: problem, close() {}, update() {} };
}
