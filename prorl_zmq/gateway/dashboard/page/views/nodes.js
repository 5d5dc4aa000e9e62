// The nodes: slots of each stage, sandboxes (jobs that are held there), memory, and when each was heard last.

import { badge, bar, card, h, redraw, table } from "../dom.js";
import { bytesOf, count, NOTHING, seconds } from "../format.js";
import { store } from "../store.js";

const PHASES = ["init", "run", "eval"];
const COLUMNS = [
  ["node", "id"],
  ["state"],
  ["INIT", "meter"],
  ["RUN", "meter"],
  ["EVAL", "meter"],
  ["jobs", "number"],
  ["memory", "meter"],
  ["disk", "meter"],
  ["last heard", "number"],
  ["lease", "meter"],
  ["version"],
  ["host"],
];

export function nodes() {
  const element = h("div");
  return { element, title: "Nodes", close() {}, update: () => redraw(element, h("h1", null, "Nodes"), content()) };
}

function content() {
  const seen = store.overview;
  if (!seen) return h("p", { class: "note" }, store.why);
  const rows = seen.nodes.map((row) => [
    row.node || h("span", { class: "quiet" }, "not joined"),
    row.state ? badge(row.state) : NOTHING,
    ...PHASES.map((phase) => (row.slots[phase] ? slots(row.used[phase] ?? 0, row.slots[phase], phase) : NOTHING)),
    count(row.held),
    room(row.facts.memory_free_bytes, row.facts.memory_total_bytes),
    room(row.facts.disk_free_bytes, row.facts.disk_total_bytes),
    row.silent_s == null ? NOTHING : `${seconds(row.silent_s)} ago`,
    lease(row.silent_s, row.lease_s),
    row.facts.version || NOTHING,
    row.host || NOTHING,
  ]);
  const lost = seen.lost_nodes.map((loss) => [
    loss.node,
    `${seconds(loss.ago_s)} ago`,
    loss.died ? "its connection ended" : "it fell silent",
    count(loss.jobs),
    count(total(loss.completed)),
    count(total(loss.ended)),
    loss.is_back ? "yes" : "no",
  ]);
  return [
    card("Known now", null, table("Nodes", COLUMNS, rows, "No node has joined yet.")),
    lost.length
      ? card(
          "Lost",
          null,
          table(
            "Lost nodes",
            [
              ["node", "id"],
              ["when"],
              ["how"],
              ["jobs there", "number"],
              ["completed elsewhere", "number"],
              ["ended otherwise", "number"],
              ["is back"],
            ],
            lost,
          ),
        )
      : null,
    h(
      "p",
      { class: "quiet small" },
      "Memory and disk are what is used; with the version and the host, they are known of nodes of prorl node. " +
        "A node whose lease ends is lost, and its jobs start again elsewhere.",
    ),
  ];
}

function slots(used, whole, phase) {
  const label = `${count(used)} of ${count(whole)}`;
  return h(
    "span",
    { class: "meter" },
    bar([[used, `part-${phase}`]], whole, `${label} slots of ${phase}`),
    h("span", null, label),
  );
}

function room(free, whole) {
  if (!whole) return NOTHING;
  const label = bytesOf(whole - free, whole);
  return h("span", { class: "meter" }, bar([[whole - free, "part-main"]], whole, label), h("span", null, label));
}

function lease(silent, whole) {
  if (!whole || silent == null) return NOTHING;
  const left = Math.max(0, whole - silent);
  const label = `${seconds(left)} of ${seconds(whole)}`;
  return h("span", { class: "meter" }, bar([[left, "part-main"]], whole, `${label} left`), h("span", null, label));
}

const total = (counts) => Object.values(counts).reduce((sum, each) => sum + each, 0);
