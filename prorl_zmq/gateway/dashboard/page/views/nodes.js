// The nodes: slots of each stage, sandboxes, memory, when each was heard last, and what is left of its lease.

import { badge, card, h, meter, redraw, table } from "../dom.js";
import { ago, bytesOf, count, NOTHING, seconds } from "../format.js";
import { store } from "../store.js";

const PHASES = ["init", "run", "eval", "score"];
const COLUMNS = [
  ["node", "id"],
  ["state"],
  ["INIT", "meter"],
  ["RUN", "meter"],
  ["EVAL", "meter"],
  ["SCORE", "meter"],
  ["jobs", "number"],
  ["sandboxes", "number"],
  ["last heard", "number"],
  ["lease", "meter"],
];
const MACHINE_COLUMNS = [["node", "id"], ["memory", "meter"], ["disk", "meter"], ["version"], ["host"]];

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
    row.facts.version ? count(row.facts.sandboxes) : NOTHING,
    ago(row.silent_s),
    leaseLeft(row.silent_s, row.lease_s),
  ]);
  const machines = seen.nodes.filter((row) => row.facts.version).map(machineCells);
  const lost = seen.lost_nodes.map((loss) => [
    loss.node,
    ago(loss.ago_s),
    loss.died ? "its connection ended" : "it fell silent",
    count(loss.jobs),
    count(total(loss.completed)),
    count(total(loss.ended)),
    loss.is_back ? "yes" : "no",
  ]);
  return [
    card("Known now", null, table("Nodes", COLUMNS, rows, "No node has joined yet.")),
    machines.length ? card("Machines", null, table("Machines", MACHINE_COLUMNS, machines)) : null,
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
      "Sandboxes are those that are open; memory and disk are what is used. A node whose lease ends is lost, and its " +
        "jobs start again elsewhere.",
    ),
  ];
}

function machineCells({ node, host, facts }) {
  return [
    node,
    room(facts.memory_free_bytes, facts.memory_total_bytes),
    room(facts.disk_free_bytes, facts.disk_total_bytes),
    facts.version,
    host,
  ];
}

function slots(used, whole, phase) {
  const label = `${count(used)} of ${count(whole)}`;
  return meter(used, whole, label, `part-${phase}`, `${label} slots of ${phase}`);
}

function room(free, whole) {
  if (!whole) return NOTHING;
  return meter(whole - free, whole, bytesOf(whole - free, whole));
}

export function leaseLeft(silent, whole) {
  if (!whole || silent == null) return NOTHING;
  const left = Math.max(0, whole - silent);
  const label = `${seconds(left)} of ${seconds(whole)}`;
  return meter(left, whole, label, "part-main", `${label} left`);
}

const total = (counts) => Object.values(counts).reduce((sum, each) => sum + each, 0);
