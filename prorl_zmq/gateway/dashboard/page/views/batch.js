// One batch: its groups as rows, their rollouts as cells, and what it waits for now.

import { ApiError, get, part } from "../api.js";
import { badge, card, figure, h, link, redraw } from "../dom.js";
import { count, reward, seconds, words } from "../format.js";
import { store } from "../store.js";
import { kept } from "./batches.js";

const AGAIN_MS = 1000;

export function batch({ path: [id] }) {
  const element = h("div");
  let problem = "";
  let asking = false;
  let lookAt = 0;
  let seen = null;

  async function look() {
    asking = true;
    try {
      seen = await get(`/v1/batches/${part(id)}/view`);
      problem = "";
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      problem = error.message;
    }
    asking = false;
    lookAt = Date.now() + (problem || seen.is_closed ? 10 : 1) * AGAIN_MS;
    draw();
  }

  function draw() {
    redraw(
      element,
      h("p", { class: "path" }, link("#/batches", null, "Batches"), " / ", h("code", null, id)),
      problem ? h("p", { class: "note", role: "alert" }, problem) : null,
      seen ? content(seen, !problem && !seen.is_closed) : null,
    );
  }

  look();
  return {
    element,
    title: `Batch ${id}`,
    close() {},
    update: () => {
      if (!asking && Date.now() >= lookAt && store.state === "live") look();
    },
  };
}

function content(view, isOpen) {
  const { status, report, current_version: version, waits_for: waitsFor, groups, left_out: leftOut } = view;
  const wasted = Object.entries(report.wasted);
  return [
    h("div", { class: "title" }, h("h1", null, "Batch"), isOpen ? badge(status.state) : null),
    view.is_closed ? h("p", { class: "note" }, "This batch is closed. This is what it came to.") : null,
    status.problem
      ? h("p", { class: "note bad" }, status.problem)
      : waitsFor && isOpen
        ? h("p", { class: "note" }, h("b", null, "Waits now for: "), waitsFor)
        : null,
    h(
      "div",
      { class: "figures" },
      figure(
        "groups kept",
        kept(status),
        `${count(report.dropped_groups)} not kept, ${count(report.given_up_groups)} given up`,
      ),
      figure("rollouts", count(report.completed), `${count(report.launched)} started, ${count(report.failed)} failed`),
      figure("carried over", count(report.adopted), `jobs taken from earlier batches`),
      figure(
        "reward of kept",
        report.kept.reward.count ? report.kept.reward.mean.toFixed(3) : "–",
        `weights of ${status.model ?? "policy"} are at version ${version}`,
      ),
      figure(
        "not used",
        count(wasted.reduce((sum, [, number]) => sum + number, 0)),
        wasted.map(([why, number]) => `${number} ${words(why)}`).join(", "),
      ),
    ),
    view.is_closed
      ? null
      : [
          card("Groups under way", null, legend(), rows(groups.filter((each) => each[2] === "under_way"))),
          card("Kept, and not acknowledged by its client", null, rows(groups.filter((each) => each[2] !== "under_way"))),
        ],
    leftOut ? h("p", { class: "quiet small" }, `${count(leftOut)} more groups are not shown.`) : null,
  ];
}

const rows = (groups) =>
  groups.length ? h("div", { class: "groups" }, groups.map(group)) : h("p", { class: "quiet" }, "None.");

function group([id, prompt, state, carriedOver, failed, cells]) {
  const rewards = cells.map((cell) => cell[2]).filter((each) => each != null);
  const mean = rewards.length ? rewards.reduce((sum, each) => sum + each, 0) / rewards.length : null;
  return h(
    "div",
    { class: `group is-${state.replace("_", "-")}` },
    h(
      "div",
      { class: "group-name" },
      link(`#/jobs?q=${part(`group:${id}`)}`, { title: id }, prompt || id),
      h(
        "span",
        { class: "quiet small" },
        [
          state === "given" ? "given" : "",
          mean == null ? "" : `mean ${reward(mean)}`,
          carriedOver ? "carried" : "",
          failed ? `${failed} replaced` : "",
        ]
          .filter(Boolean)
          .join(" · "),
      ),
    ),
    h("div", { class: "cells" }, cells.map(cell)),
  );
}

function cell([state, jobId, value, staleness, spent]) {
  const kind =
    state === "in" ? `in reward-${value == null ? "none" : value <= 0 ? "zero" : value >= 1 ? "full" : "part"}` : state;
  const told = [
    state === "in" ? `reward ${reward(value)}` : state,
    staleness ? `${staleness} versions behind` : "",
    spent ? seconds(spent) : "",
  ]
    .filter(Boolean)
    .join(", ");
  const sign = state === "in" ? (value == null ? "–" : reward(value).slice(0, 4)) : state === "running" ? "•" : "";
  const content = [sign, staleness ? h("sup", null, staleness) : null];
  return jobId
    ? link(`#/jobs/${part(jobId)}`, { class: `cell ${kind}`, title: `${jobId}: ${told}`, "aria-label": told }, content)
    : h("span", { class: `cell ${kind}`, title: told, "aria-label": told, role: "img" }, content);
}

function legend() {
  const kinds = [
    ["running", "running or queued"],
    ["in reward-full", "reward 1 or more"],
    ["in reward-part", "between"],
    ["in reward-zero", "0 or less"],
    ["missing", "not started"],
  ];
  return h(
    "p",
    { class: "legend", "aria-hidden": "true" },
    kinds.map(([kind, name]) => h("span", null, h("i", { class: `cell ${kind}` }), name)),
    h("span", null, "¹ ² …: weight versions behind"),
  );
}
