"""All metrics of a service: names, meanings and labels. `docs/metrics.md` is generated from this file.

Units are seconds and bytes; counters end in `_total`. A gauge is the sum over the processes that report it. Labels are
bounded (see `metric`); jobs, sandboxes and sessions are not labels.
"""

from __future__ import annotations

from .metric import Counter, Gauge, Histogram, Metric

QUICK_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Of writes and requests."""
STEP_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0)
"""Of a turn, a tool call, the start of a sandbox."""
PHASE_S = (0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0)
VERSIONS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0)

# Rollout brokers ------------------------------------------------------------------------------------------------------

JOBS_SUBMITTED = Counter("prorl_jobs_submitted_total", "Accepted jobs, including those of batches.", ("task",))
JOBS_ENDED = Counter(
    "prorl_jobs_ended_total",
    "Jobs that ended, by outcome and by the code of the error, which is empty where there is none.",
    ("task", "outcome", "code"),
)
JOBS = Gauge(
    "prorl_jobs", "Jobs that have not ended: queued for a phase, or held by a stage process.", ("phase", "state")
)
QUEUE_SECONDS = Histogram(
    "prorl_queue_seconds",
    "Queue time of an ended job, summed over attempts.",
    ("phase",),
    buckets=PHASE_S,
)
SLOTS = Gauge("prorl_slots", "Slots, busy or free.", ("role",))
SLOTS_BUSY = Gauge("prorl_slots_busy", "Busy slots.", ("role",))
STAGE_POOLS = Gauge("prorl_stage_pools", "Stage processes, or nodes that report for theirs.", ("role",))
REDELIVERED = Counter("prorl_phases_redelivered_total", "Phases started again after a loss.")
RECORDS_DROPPED = Counter(
    "prorl_records_dropped_total", "Records of ended jobs that were asked for and dropped.", ("record",)
)
BLOCKS_LOST = Counter("prorl_blocks_lost_total", "Trajectories lost with their node, so that their jobs ran again.")
RESULTS_UNCOLLECTED = Gauge("prorl_results_uncollected", "Results that no client has acknowledged.")
RESULTS_MEMORY = Gauge("prorl_results_memory_bytes", "Memory of the trajectories of unacknowledged results.")
BATCHES_OPEN = Gauge("prorl_batches_open", "Open batches.", ("state",))
BATCH_GROUPS = Gauge("prorl_batch_groups", "Groups of open batches: under_way, kept, or prompts that wait.", ("state",))
GROUPS_ENDED = Counter("prorl_groups_ended_total", "Groups of closed batches: kept, dropped, or given_up.", ("fate",))
ROLLOUTS_WASTED = Counter(
    "prorl_rollouts_wasted_total", "Rollouts of closed batches that ran and are not used.", ("reason",)
)
ROLLOUTS_WASTED_SECONDS = Counter("prorl_rollouts_wasted_seconds_total", "Work in wasted rollouts.", ("reason",))
STALENESS = Histogram(
    "prorl_staleness_versions",
    "Weight versions between a batch rollout's oldest token and its model's weights at its end.",
    ("model",),
    buckets=VERSIONS,
)
JOURNAL_BYTES = Gauge("prorl_journal_bytes", "Size of the journal and of its trajectory files.")
JOURNAL_STUCK = Gauge("prorl_journal_stuck", "1 while a journal cannot be written, and nothing is sent.")
JOURNAL_WRITE_SECONDS = Histogram("prorl_journal_write_seconds", "Duration of one write.", buckets=QUICK_S)

# Backend broker -------------------------------------------------------------------------------------------------------

BACKENDS = Gauge("prorl_backends", "Inference backends.", ("model", "state"))
BACKEND_JOBS_WAITING = Gauge("prorl_backend_jobs_waiting", "Jobs in RUN that wait for a backend.", ("model",))
BACKEND_JOBS = Gauge("prorl_backend_jobs", "Jobs that a backend is assigned to.", ("backend",))
BACKEND_ROOM = Gauge(
    "prorl_backend_room", "Jobs from which a backend gets no new ones, by what its KV cache holds.", ("backend",)
)
BACKEND_WAIT_SECONDS = Histogram(
    "prorl_backend_wait_seconds",
    "How long a job waited for room at a ready backend; jobs that did not are not counted.",
    ("model",),
    buckets=PHASE_S,
)
BACKEND_ASSIGNED = Counter("prorl_backend_assigned_total", "Assignments of jobs to a backend.", ("backend",))
BACKEND_FAILURES = Counter(
    "prorl_backend_failures_total", "Failed generations that stage processes have reported.", ("backend",)
)
BACKEND_WEIGHT_VERSION = Gauge(
    "prorl_backend_weight_version", "The weights that a backend of a model serves.", ("model", "backend")
)
WEIGHTS_REQUEST_SECONDS = Histogram(
    "prorl_weights_request_seconds",
    "Duration of a request about weights, until all engine hosts have answered.",
    ("request", "result"),
    buckets=STEP_S,
)

# Engine hosts ---------------------------------------------------------------------------------------------------------

ENGINE_REQUESTS = Counter(
    "prorl_engine_requests_total",
    "Generations that ended: stop, length, abort (new weights came), cancelled, or failed.",
    ("backend", "result"),
)
ENGINE_RUNNING = Gauge("prorl_engine_requests_running", "Generations under way.", ("backend",))
ENGINE_QUEUED = Gauge("prorl_engine_requests_queued", "Requests that wait in the engine.", ("backend",))
ENGINE_PARKED = Gauge(
    "prorl_engine_turns_parked", "Turns that the engine's host holds back while the KV cache is full.", ("backend",)
)
ENGINE_KV_USED = Gauge(
    "prorl_engine_kv_used_ratio",
    "Share of the KV cache that running requests use, smoothed over a minute.",
    ("backend",),
)
ENGINE_PREEMPTIONS = Counter(
    "prorl_engine_preemptions_total", "Requests that the engine preempted, because its KV cache was full.", ("backend",)
)
ENGINE_SECONDS = Histogram("prorl_engine_generate_seconds", "Duration of one generation.", ("backend",), buckets=STEP_S)
ENGINE_TOKENS = Counter(
    "prorl_engine_tokens_total",
    "Tokens: prompt, cached (those of the prompt that the prefix cache had), again (that it had before, and were "
    "computed again), and generated.",
    ("backend", "kind"),
)
ENGINE_UPDATE_SECONDS = Histogram(
    "prorl_engine_update_seconds",
    "Duration of one step of a weight update.",
    ("backend",),
    buckets=STEP_S,
)
ENGINE_UNWELL = Gauge("prorl_engine_unwell", "1 while the engine reports that it cannot serve.", ("backend",))

# Stage processes ------------------------------------------------------------------------------------------------------

PHASE_SECONDS = Histogram(
    "prorl_phase_seconds", "Duration of one attempt of a phase, for any outcome.", ("phase", "task"), buckets=PHASE_S
)
PHASE_FAILURES = Counter("prorl_phase_failures_total", "Attempts of a phase that failed.", ("phase", "task", "code"))
GENERATE_SECONDS = Histogram(
    "prorl_generate_seconds", "Duration of one generation, as the agent loop sees it.", ("backend",), buckets=STEP_S
)
TURNS = Counter("prorl_turns_total", "Turns of the policy in phases that ended.", ("task",))
TOKENS = Counter(
    "prorl_tokens_total", "Tokens in ended phases: prompt, cached, generated and scored.", ("task", "kind")
)
TOOL_SECONDS = Histogram("prorl_tool_seconds", "Duration of one tool call.", ("tool",), buckets=STEP_S)
TOOL_CALLS_MALFORMED = Counter(
    "prorl_tool_calls_malformed_total", "Tool calls that are malformed or name an unknown tool.", ("task",)
)
SANDBOX_START_SECONDS = Histogram(
    "prorl_sandbox_start_seconds", "Duration of one start of a sandbox.", ("kind",), buckets=STEP_S
)
SANDBOX_FAILURES = Counter("prorl_sandbox_failures_total", "Sandboxes that did not start.", ("kind",))

# Nodes ----------------------------------------------------------------------------------------------------------------

SANDBOXES = Gauge("prorl_sandboxes", "Sandboxes that are open on this machine, in this run folder.")
NODE_SLOTS = Gauge("prorl_node_slots", "Slots of this node, of all rollout brokers.", ("role",))
NODE_SLOTS_BUSY = Gauge("prorl_node_slots_busy", "Busy slots of this node.", ("role",))
NODE_PHASES_WAITING = Gauge("prorl_node_phases_waiting", "Phases at the node that wait for a slot.")
NODE_BLOCKS = Gauge("prorl_node_blocks", "Trajectories that the node keeps.")
NODE_BLOCKS_BYTES = Gauge("prorl_node_blocks_bytes", "Size of the trajectories that the node keeps.")

# Gateway --------------------------------------------------------------------------------------------------------------

GATEWAY_REQUESTS = Counter("prorl_gateway_requests_total", "HTTP requests answered.", ("route", "method", "status"))
GATEWAY_REQUEST_SECONDS = Histogram(
    "prorl_gateway_request_seconds", "Duration of one HTTP request, including long polls.", ("route",), buckets=STEP_S
)
GATEWAY_REQUESTS_OPEN = Gauge("prorl_gateway_requests_open", "HTTP requests under way.")

# Every process --------------------------------------------------------------------------------------------------------

PROCESSES = Gauge("prorl_processes", "Processes that report to this collector.", ("process",))
PROCESS_CPU = Counter("prorl_process_cpu_seconds_total", "CPU time by kind of process.", ("process",))
PROCESS_MEMORY = Gauge("prorl_process_resident_memory_bytes", "Memory by kind of process.", ("process",))
PROCESS_PAUSED = Counter(
    "prorl_process_paused_seconds_total",
    "Time in pauses of over a second: the process was stopped, or its loop was blocked.",
    ("process",),
)
PROCESS_RESTARTS = Counter("prorl_process_restarts_total", "Processes that ended and were restarted.", ("process",))
UNREAD_ROUNDS = Counter(
    "prorl_broker_unread_rounds_total",
    "Rounds of a broker's loop that left messages unread: the broker is overloaded.",
    ("process",),
)
BUILD = Gauge("prorl_build_info", "Always 1; the label is the version of the package.", ("version",))

METRICS: dict[str, Metric] = {one.name: one for one in tuple(globals().values()) if isinstance(one, Metric)}
