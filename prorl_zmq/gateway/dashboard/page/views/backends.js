// The engines: what each does, how often it finds a prompt in its cache, which weights it serves, and when its host was
// heard last.

import { ApiError, part, send } from "../api.js";
import { badge, card, h, meter, redraw, table } from "../dom.js";
import { ago, bytes, compact, count, NOTHING, percent, rate, seconds } from "../format.js";
import { session } from "../session.js";
import { store } from "../store.js";
import { leaseLeft } from "./nodes.js";

export const BACKEND_COLUMNS = [
  ["backend", "id"],
  ["state"],
  ["in flight", "meter"],
  ["tokens/s", "number"],
  ["cache hits", "number"],
  ["weights", "number"],
  ["name", "text"],
  ["model", "text"],
  ["node"],
];

export function backendRows(list) {
  return list.backends.map((status) => {
    const { backend, load } = status;
    const limit = status.room ?? backend.max_in_flight;
    return [
      backend.backend_id,
      badge(status.state),
      meter(status.in_flight, limit, `${count(status.in_flight)} of ${count(limit)}`),
      load && (load.tokens_per_s || !load.running) ? rate(load.tokens_per_s) : NOTHING, // of ended turns
      load?.prompt_tokens ? percent(load.cached_tokens / load.prompt_tokens, 0) : NOTHING,
      backend.frozen ? "frozen" : backend.weight_version,
      backend.name ?? "policy",
      backend.model || NOTHING,
      backend.node,
    ];
  });
}

export function backends() {
  const element = h("div");
  let problem = "";
  async function drain(id) {
    if (!confirm(`Drain backend ${id}? It gets no more jobs; those that have it keep it.`)) return;
    try {
      await send("POST", `/v1/backends/${part(id)}/drain`);
      problem = "";
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      problem = error.message;
    }
    update();
  }
  function update() {
    redraw(
      element,
      h("h1", null, "Backends"),
      problem ? h("p", { class: "note bad", role: "alert" }, problem) : null,
      content(drain),
    );
  }
  return { element, title: "Backends", close() {}, update };
}

function content(drain) {
  const list = store.overview?.backends;
  if (!list) return h("p", { class: "note" }, store.overview?.problems["backend broker"] ?? store.why);
  const columns = [
    ...BACKEND_COLUMNS,
    ["assigned", "number"],
    ["generated", "number"],
    ["context", "number"],
    ["", ""],
  ];
  const rows = backendRows(list).map((cells, index) => {
    const { backend, assigned, load, state } = list.backends[index];
    const button =
      session.may("drain") && state !== "draining"
        ? h(
            "button",
            { type: "button", "data-key": `drain ${backend.backend_id}`, onclick: () => drain(backend.backend_id) },
            "Drain",
          )
        : "";
    return [
      ...cells,
      compact(assigned),
      load ? compact(load.generated_tokens) : NOTHING,
      backend.context_tokens ? count(backend.context_tokens) : NOTHING,
      button,
    ];
  });
  const hosts = list.backends.filter((status) => status.silent_s != null).map(hostCells);
  const caches = list.backends.filter((status) => status.load?.kv_tokens).map(cacheCells);
  const warned = list.backends.filter((status) => status.backend.warning);
  const unwell = list.backends.filter((status) => status.problem);
  const fetching = list.backends.filter((status) => status.fetching != null);
  return [
    h("p", { class: "quiet" }, `${count(list.waiting)} jobs wait for a backend.`),
    card("Registered", null, table("Backends", columns, rows, "No backend has registered.")),
    list.adapters?.length ? card("Adapters", null, table("Adapters", ADAPTER_COLUMNS, adapterRows(list))) : null,
    unwell.length
      ? card(
          "Not serving",
          null,
          table(
            "Not serving",
            [["backend", "id"], ["state"], ["why", "text long"], ["next try", "number"]],
            unwell.map((status) => [
              status.backend.backend_id,
              badge(status.state),
              status.problem,
              status.next_try_s == null ? NOTHING : seconds(status.next_try_s),
            ]),
          ),
        )
      : null,
    fetching.length
      ? card(
          "Fetching weights",
          null,
          table(
            "Fetching weights",
            [["backend", "id"], ["version", "number"]],
            fetching.map((status) => [status.backend.backend_id, status.fetching]),
          ),
          h("p", { class: "quiet small" }, "The hosts fetch these weights; their engines generate meanwhile."),
        )
      : null,
    warned.length
      ? card(
          "Warnings",
          null,
          table(
            "Warnings",
            [["backend", "id"], ["what", "text long"]],
            warned.map((status) => [status.backend.backend_id, status.backend.warning]),
          ),
        )
      : null,
    caches.length
      ? card(
          "KV caches",
          null,
          table("KV caches", CACHE_COLUMNS, caches),
          h(
            "p",
            { class: "quiet small" },
            "In use by running requests; cached prefixes that none of them uses do not count. Computed again: the " +
              "share of prompt tokens that had been cached. Above a fifth, an engine has too many rollouts.",
          ),
        )
      : null,
    hosts.length
      ? card(
          "Engine hosts",
          null,
          table("Engine hosts", HOST_COLUMNS, hosts),
          h(
            "p",
            { class: "quiet small" },
            "Memory is that of the host's process and of those that it has started. A host whose lease ends is taken " +
              "off the list.",
          ),
        )
      : null,
    list.starts.length
      ? card(
          "Starting",
          null,
          table(
            "Starting",
            [["engine", "id"], ["state"], ["why", "text long"]],
            list.starts.map((start) => [start.backend_id, badge(start.state), start.problem]),
          ),
        )
      : null,
  ];
}

const ADAPTER_COLUMNS = [
  ["model", "text"],
  ["base", "text"],
  ["version", "number"],
  ["in flight", "number"],
  ["versions loaded", "text long"],
];

function adapterRows(list) {
  return list.adapters.map(({ model, base, weight_version: version, in_flight: jobs }) => {
    const hosts = list.backends.filter(({ backend }) => (backend.name ?? "policy") === base && backend.adapter_slots);
    const where = hosts.map(({ backend, adapter_problems: problems }) => {
      const loaded = (backend.adapters?.[model] ?? []).join(", ") || NOTHING;
      return `${backend.backend_id}: ${loaded}${problems?.[model] ? ` (${problems[model]})` : ""}`;
    });
    return [model, base, version, count(jobs ?? 0), where.join("; ")];
  });
}

const CACHE_COLUMNS = [
  ["backend", "id"],
  ["tokens", "number"],
  ["in use", "number"],
  ["rollouts", "number"],
  ["room", "number"],
  ["requests waiting", "number"],
  ["preempted", "number"],
  ["computed again", "number"],
];

function cacheCells({ backend, load, in_flight: held, room }) {
  return [
    backend.backend_id,
    count(load.kv_tokens),
    percent(load.kv_used ?? 0, 0),
    count(held),
    room == null ? NOTHING : count(room),
    count(load.queued ?? 0),
    count(load.preempted ?? 0),
    load.prompt_tokens ? percent((load.again_tokens ?? 0) / load.prompt_tokens, 0) : NOTHING,
  ];
}

// A backend that was added by hand has no host that would tell these.
const HOST_COLUMNS = [
  ["backend", "id"],
  ["memory", "number"],
  ["last heard", "number"],
  ["lease", "meter"],
  ["version"],
];

function hostCells({ backend, load, silent_s: silent, lease_s: lease }) {
  const memory = load.memory_bytes ? bytes(load.memory_bytes) : NOTHING;
  return [backend.backend_id, memory, ago(silent), leaseLeft(silent, lease), backend.version || NOTHING];
}
