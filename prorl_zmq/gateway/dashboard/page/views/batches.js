// The open batches: how far each is.

import { badge, card, h, link, meter, redraw, table } from "../dom.js";
import { count, sessionName, shortId } from "../format.js";
import { store } from "../store.js";

export const BATCH_COLUMNS = [
  ["batch", "id"],
  ["state"],
  ["groups kept", "meter"],
  ["jobs in flight", "number"],
  ["failed jobs", "number"],
  ["session"],
  ["under way", "number"],
  ["prompts waiting", "number"],
  ["dropped", "number"],
];

export function batchRows(list) {
  return list.map((batch) => [
    link(`#/batches/${encodeURIComponent(batch.batch_id)}`, null, shortId(batch.batch_id)),
    badge(batch.state),
    kept(batch),
    count(batch.in_flight),
    count(batch.failed),
    sessionName(batch.session),
    count(batch.under_way),
    count(batch.prompts),
    count(batch.dropped),
  ]);
}

export function kept(batch) {
  const label = `${count(batch.kept)} of ${count(batch.target_groups)}`;
  return meter(Math.min(batch.kept, batch.target_groups), batch.target_groups, label, "part-good", `${label} groups`);
}

export function batches() {
  const element = h("div");
  return { element, title: "Batches", close() {}, update: () => redraw(element, h("h1", null, "Batches"), content()) };
}

function content() {
  const status = store.overview?.status;
  if (!status) return h("p", { class: "note" }, store.why || "The rollout broker does not answer.");
  return card("Open", null, table("Open batches", BATCH_COLUMNS, batchRows(status.batches), "No batch is open."));
}
