// The page of one job: how it ended, where its time went, what was said, its tokens, and its notes.

import { ApiError, get, part, send } from "../api.js";
import { badge, card, figure, h, link, redraw, table } from "../dom.js";
import { clock, count, NOTHING, number, reward, seconds, words } from "../format.js";
import { session } from "../session.js";
import { store } from "../store.js";
import { conversation, longText } from "../conversation.js";
import { LiveTurns } from "../live_turns.js";
import { Timeline } from "../timeline.js";
import { tokenMap } from "../token_map.js";

const AGAIN_MS = 1000;

export function job({ path: [id] }) {
  const head = h("div");
  const timeline = new Timeline();
  const time = card("Time", { hidden: true }, timeline.element);
  const body = h("div");
  const element = h("div", { class: "job" }, head, time, body);
  const live = new LiveTurns();
  let trace = null;
  let view = null;
  let problem = "";
  let asking = false;
  let lookAt = 0;
  let seen = null;
  let isOver = false; // nothing more will come

  async function look() {
    asking = true;
    try {
      trace = await get(`/v1/jobs/${part(id)}/trace`);
      problem = "";
      if (trace.outcome && !view) {
        isOver = true;
        draw(); // a tokenizer may have to be loaded first
        view = await get(`/v1/jobs/${part(trace.job_id)}/view`);
        redraw(body, rollout(view));
      } else if (!trace.outcome) await lookAtTurns();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      problem = error.message;
      isOver &&= error.status === 404; // its client has had it
    }
    asking = false;
    lookAt = Date.now() + AGAIN_MS;
    if (problem && !view && (isOver || !trace)) redraw(body); // turns that were shown stay
    draw();
  }

  async function lookAtTurns() {
    try {
      live.show(await get(`/v1/jobs/${part(trace.job_id)}/turns?${live.query}`));
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      live.fail(error.status === 404 ? "" : error.message); // it ends just now
    }
  }

  function draw() {
    redraw(
      head,
      trace ? heading(trace, view?.result) : h("h1", null, "Job ", h("code", null, id)),
      problem ? h("p", { class: "note warn", role: "alert" }, problem) : null,
    );
    time.hidden = !trace;
    if (trace) timeline.update(trace, view?.result.steps ?? live.steps);
    if (view || problem) return;
    if (!trace || trace.outcome) redraw(body, h("p", { class: "note", role: "status" }, "Asking for its conversation …"));
    else if (!live.element.isConnected) body.replaceChildren(live.element);
  }

  function heading(trace, result) {
    const row = store.rows.get(trace.job_id);
    const state = trace.outcome ?? row?.state ?? "open";
    const mayCancel = !trace.outcome && session.may("cancel");
    return [
      h(
        "p",
        { class: "path" },
        link("#/jobs", null, "Jobs"),
        " / ",
        h("code", null, trace.job_id),
        trace.group_id
          ? [" of group ", link(`#/jobs?q=${part(`group:${trace.group_id}`)}`, null, h("code", null, trace.group_id))]
          : null,
      ),
      h(
        "div",
        { class: "title" },
        h("h1", null, trace.task || row?.task || "Job"),
        badge(state, words(state)),
        mayCancel
          ? h("button", { type: "button", class: "danger", "data-key": "cancel", onclick: cancel }, "Cancel this job")
          : null,
      ),
      h(
        "div",
        { class: "figures" },
        figure("reward", reward(trace.reward), trace.stop_reason ? words(trace.stop_reason) : ""),
        figure(
          trace.outcome ? "took" : "so far",
          seconds(trace.ended_s ?? trace.age_s),
          `accepted ${clock(trace.accepted_at)}`,
        ),
        figure("turns", count(result?.metrics.turns ?? live.turns), result ? number(result.metrics.tool_calls ?? 0, "tool call") : ""),
        figure(
          "tokens",
          count(trace.tokens || live.tokens || null),
          result?.metrics.generated_tokens != null ? `${count(result.metrics.generated_tokens)} generated` : "",
        ),
        figure(
          "attempt",
          trace.spans.at(-1)?.attempt ?? 1,
          result?.backend ? `backend ${result.backend} of ${result.model ?? "policy"}` : "",
        ),
      ),
      trace.error
        ? h("div", { class: "note bad" }, h("b", null, words(trace.error.code)), longText(trace.error.message))
        : null,
    ];
  }

  async function cancel() {
    if (!confirm(`Cancel job ${id}? Its rollout ends now, as far as it came.`)) return;
    try {
      await send("POST", `/v1/jobs/${part(trace.job_id)}/cancel`);
    } catch (error) {
      problem = error.message;
      draw();
    }
    look();
  }

  // The stream says when the job has moved; while it is open, its time line grows by itself.
  function update() {
    const row = store.rows.get(trace?.job_id ?? id);
    const moved = row !== seen;
    seen = row;
    if (!asking && Date.now() >= lookAt && (moved || !isOver)) look();
  }

  draw();
  look();
  return { element, title: `Job ${id}`, update, close() {} };
}

// What a result and its transcript show; also of a rollout in a run folder.
export function rollout({ result, transcript, problem }) {
  return [
    card("Conversation", null, problem ? h("p", { class: "note" }, problem) : null, conversation(transcript)),
    speakers(result),
    transcript.token_ids.length ? card("Tokens", null, tokenMap(transcript)) : null,
    notes(result),
    measures(result),
  ];
}

// Who spoke, if the rollout has several conversations or a named one.
function speakers({ conversations, reward: whole }) {
  if (!conversations?.length) return null;
  const columns = [["conversation", "text"], ["reward", "number"], ["stopped by", "text"]];
  const cells = conversations.map((each) => [
    each.trained === false ? `${each.name} (not trained)` : each.name,
    each.trained === false ? NOTHING : reward(each.reward ?? whole),
    each.stop_reason ? words(each.stop_reason) : NOTHING,
  ]);
  return card("Conversations", null, table("Conversations", columns, cells));
}

function notes(result) {
  const entries = Object.entries(result.notes);
  return entries.length
    ? card(
        "Notes",
        null,
        entries.map(([name, text]) =>
          h("details", { open: text.length < 4000 }, h("summary", null, words(name)), longText(text)),
        ),
      )
    : null;
}

function measures(result) {
  const columns = [["name"], ["value", "number"]];
  const timings = Object.entries(result.timings).map(([name, value]) => [name, seconds(value)]);
  const metrics = Object.entries(result.metrics).map(([name, value]) => [
    words(name),
    value == null ? NOTHING : Number.isInteger(value) ? count(value) : value.toPrecision(4),
  ]);
  return h(
    "div",
    { class: "columns" },
    card("Seconds", null, table("Seconds", columns, timings)),
    card("Measures", null, table("Measures", columns, metrics)),
  );
}
