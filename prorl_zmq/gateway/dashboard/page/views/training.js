// A training over its steps: what its batches brought, and how its time was shared between rollouts and the trainer.

import { ApiError, get } from "../api.js";
import { card, choice, figure, h, link, redraw, table } from "../dom.js";
import { clock, count, NOTHING, number, percent, reward, seconds, sessionName, shortId } from "../format.js";
import { lineChart } from "../line_chart.js";
import { store } from "../store.js";

const AGAIN_MS = 5000;
const SHOWN_STEPS = 50;
const SHOWN_SESSIONS = 6;
const figureOf = (value) => (Number.isInteger(value) ? count(value) : value < 100 ? value.toFixed(2) : count(value));

export function training({ query }) {
  const element = h("div", { class: "training" });
  let session = query.get("session") ?? "";
  let found = null;
  let problem = "";
  let asking = false;
  let lookAt = 0;
  let chosen = null; // a step; null: the last one

  async function look() {
    asking = true;
    try {
      found = (await get("/v1/trainings")).trainings;
      problem = "";
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      problem = error.message;
    }
    asking = false;
    lookAt = Date.now() + AGAIN_MS;
    draw();
  }

  function draw() {
    redraw(
      element,
      h("h1", null, "Training"),
      problem ? h("p", { class: "note warn", role: "alert" }, problem) : null,
      found ? content() : h("p", { class: "note", role: "status" }, "Asking the brokers …"),
    );
  }

  function content() {
    if (!found.length)
      return h(
        "p",
        { class: "note" },
        "No batch was closed since the broker was started. A training appears here once it has closed one (open_batch).",
      );
    const shown = found.slice(0, SHOWN_SESSIONS);
    const current = found.find((one) => one.session === session) ?? found[0];
    const names = Object.fromEntries(shown.map((one) => [one.session, sessionName(one.session)]));
    return [
      found.length > 1
        ? h(
            "div",
            { class: "tools" },
            choice("Session", names, current.session, (name) => {
              session = name;
              chosen = null;
              history.replaceState(null, "", `#/training?${new URLSearchParams({ session })}`);
              draw();
            }),
          )
        : h("p", { class: "path" }, "Session ", h("code", null, sessionName(current.session))),
      stepsOf(current),
    ];
  }

  function stepsOf({ steps }) {
    const at = Math.min(chosen ?? steps.length - 1, steps.length - 1);
    const step = steps[at];
    const of = (name) => steps.map((one) => one[name]);
    const picked = {
      chosen: at,
      onchoose: (index) => {
        if (index === at) return;
        chosen = index === steps.length - 1 ? null : index;
        draw();
      },
    };
    return [
      h(
        "div",
        {
          class: "figures",
          tabindex: 0,
          role: "group",
          "aria-label": `Step ${at + 1} of ${steps.length}: the left and right arrow choose another`,
          "data-key": "step",
          onkeydown: (event) => {
            const move = { ArrowLeft: -1, ArrowRight: 1, Home: -steps.length, End: steps.length }[event.key];
            if (!move) return;
            event.preventDefault();
            picked.onchoose(Math.min(steps.length - 1, Math.max(0, at + move)));
          },
        },
        figure("step", `${count(at + 1)} of ${count(steps.length)}`, clock(step.at)),
        figure("reward", reward(step.reward), `${number(step.rollouts, "rollout")}, ${number(step.groups, "group")} kept`),
        figure("took", seconds(step.step_s), `weights at version ${step.weight_version}`),
        figure("overlap", percent(step.overlap, 0), "of the time both work"),
      ),
      h(
        "div",
        { class: "charts" },
        chart("Reward", [["mean", "series-0", of("reward")]], reward, picked),
        chart(
          "Tokens per rollout",
          [
            ["mean", "series-0", of("tokens")],
            ["nine of ten have at most", "series-1", of("tokens_p90")],
          ],
          figureOf,
          picked,
        ),
        chart(
          "Staleness in weight versions",
          [
            ["mean", "series-0", of("staleness")],
            ["most", "series-1", of("staleness_most")],
          ],
          figureOf,
          { ...picked, top: 1 },
        ),
        chart(
          "Time of the step in which … work",
          [
            ["rollouts", "series-0", of("rollouts_share")],
            ["the trainer", "series-1", of("trainer_share")],
            ["both", "series-2", of("overlap")],
          ],
          (value) => percent(value, 0),
          { ...picked, top: 1 },
        ),
      ),
      tableOf(steps),
      h(
        "p",
        { class: "quiet small" },
        "A step is a batch. The trainer counts as working from when it has a batch until it announces the next weights.",
      ),
    ];
  }

  look();
  return {
    element,
    title: "Training",
    close() {},
    update: () => {
      if (!asking && Date.now() >= lookAt && store.state === "live") look();
    },
  };
}

const chart = (title, ...rest) => h("section", { class: "card" }, lineChart(title, ...rest));

function tableOf(steps) {
  const columns = [
    ["step", "number"],
    ["reward", "number"],
    ["overlap", "number"],
    ["tokens", "number"],
    ["staleness", "number"],
    ["took", "number"],
    ["rollouts", "number"],
    ["failed", "number"],
    ["version", "number"],
    ["batch", "id"],
  ];
  const rows = steps
    .map((step, index) => [
      count(index + 1),
      reward(step.reward),
      percent(step.overlap, 0),
      count(step.tokens),
      figureOf(step.staleness),
      step.step_s == null ? NOTHING : seconds(step.step_s),
      count(step.rollouts),
      count(step.failed),
      count(step.weight_version),
      link(`#/batches/${encodeURIComponent(step.batch_id)}`, null, shortId(step.batch_id)),
    ])
    .slice(-SHOWN_STEPS)
    .reverse();
  return card("Steps", null, table("Steps", columns, rows));
}
