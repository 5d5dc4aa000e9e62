// The service's messages leave out fields that have their defaults; here they get them back.

const SHAPES = {
  status: {
    stages: [],
    queued: {},
    running: {},
    outcomes: {},
    uncollected: 0,
    redelivered: 0,
    batches: [],
    uptime_s: 0,
  },
  overview: {
    brokers: {},
    backends: null,
    status: null,
    nodes: [],
    lost_nodes: [],
    ended_per_s: 0,
    ended: [],
    problems: {},
  },
  batch: { problem: "", dropped: 0, failed: 0, failures: {}, given_up: 0 },
  report: { launched: 0, completed: 0, failed: 0, adopted: 0, dropped_groups: 0, given_up_groups: 0, wasted: {} },
  batchView: { groups: [], left_out: 0, is_closed: false },
  backends: { backends: [], waiting: 0, starts: [] },
  backendStatus: { problem: "", next_try_s: null, load: null, silent_s: null, lease_s: 0 },
  backend: { model: "", weight_version: 0, node: "local", max_in_flight: 256, context_tokens: 0, version: "", warning: "" },
  load: {
    running: 0,
    tokens_per_s: 0,
    prompt_tokens: 0,
    cached_tokens: 0,
    generated_tokens: 0,
    memory_bytes: 0,
  },
  start: { problem: "" },
  node: { node: "", host: "", state: "", slots: {}, used: {}, held: 0, silent_s: null, lease_s: 0 },
  facts: {
    version: "",
    sandboxes: 0,
    memory_free_bytes: 0,
    memory_total_bytes: 0,
    disk_free_bytes: 0,
    disk_total_bytes: 0,
  },
  lost: { is_back: false, completed: {}, ended: {} },
  trace: {
    restarts: [],
    outcome: null,
    ended_s: null,
    task: "",
    group_id: "",
    reward: null,
    stop_reason: "",
    tokens: 0,
    turns: 0,
    error: null,
  },
  span: { end_s: null, stage_id: "", node: "", backends: [], error: null },
  result: { metrics: {}, timings: {}, notes: {}, steps: [], reward: null, error: null },
  trainingStep: { step_s: null, rollouts_share: null, trainer_share: null, overlap: null },
  soFar: { backend: "", turns: 0, tokens: 0, shown_turns: 0, shown_tokens: 0, policy_turns_before: 0, cut_tokens: 0, steps: [] },
  transcript: { turns: [], tokens: null, token_ids: [], mask: [], logprobs: [], versions: [] },
};

const as = (shape, value) => ({ ...SHAPES[shape], ...value });
const all = (shape, values) => values.map((value) => as(shape, value));

export function overviewOf(raw) {
  const seen = as("overview", raw);
  seen.status &&= statusOf(seen.status);
  seen.backends &&= backendsOf(seen.backends);
  seen.ended = seen.ended.map(([at, seconds, outcomes]) => ({ at, seconds, outcomes: outcomes ?? {} }));
  seen.nodes = seen.nodes.map((node) => ({ ...as("node", node), facts: as("facts", node.facts) }));
  seen.lost_nodes = all("lost", seen.lost_nodes);
  return seen;
}

function statusOf(raw) {
  const status = as("status", raw);
  status.batches = all("batch", status.batches);
  return status;
}

function backendsOf(raw) {
  const list = as("backends", raw);
  list.backends = list.backends.map((each) => ({
    ...as("backendStatus", each),
    backend: as("backend", each.backend),
    load: each.load ? as("load", each.load) : null,
  }));
  list.backends.sort((one, other) => one.backend.backend_id.localeCompare(other.backend.backend_id, "en", { numeric: true }));
  list.starts = all("start", list.starts);
  return list;
}

export const traceOf = (raw) => ({ ...as("trace", raw), spans: all("span", raw.spans) });
export const viewOf = (raw) => ({
  problem: raw.problem ?? "",
  result: as("result", raw.result),
  transcript: as("transcript", raw.transcript),
});

export const liveOf = (raw) => ({
  ...raw,
  so_far: raw.so_far ? as("soFar", raw.so_far) : null,
  transcript: raw.transcript ? as("transcript", raw.transcript) : null,
});

export const trainingsOf = (raw) =>
  raw.trainings.map((training) => ({ ...training, steps: all("trainingStep", training.steps) }));

export function batchOf(raw) {
  const kept = { count: 0, mean: 0, ...raw.report.kept?.reward };
  return {
    ...as("batchView", raw),
    status: as("batch", raw.status),
    report: { ...as("report", raw.report), keptReward: kept },
  };
}
