// The table of jobs: searched, filtered and sorted in the page itself.

import { badge, h } from "../dom.js";
import { clock, count, NOTHING, reward, seconds, shortId, words } from "../format.js";
import { filterOf, HELP, placeOf, withPlace } from "../job_filter.js";
import { ageOf, store } from "../store.js";
import { VirtualTable } from "../virtual_table.js";

const STATES = [
  "open",
  "queued",
  "init",
  "run",
  "eval",
  "score",
  "ended",
  "completed",
  "failed",
  "timeout",
  "infrastructure_error",
  "cancelled",
];
const COLUMNS = [
  { name: "job_id", title: "Job", kind: "id", cell: (row) => shortId(row.job_id), by: (row) => row.job_id },
  {
    name: "state",
    title: "State",
    kind: "state",
    cell: (row) => badge(row.state, words(row.state)),
    by: (row) => row.state,
  },
  { name: "task", title: "Task", kind: "text wide short", cell: (row) => row.task, by: (row) => row.task },
  { name: "code", title: "Error", kind: "text wide", cell: (row) => row.code, by: (row) => row.code },
  {
    name: "reward",
    title: "Reward",
    kind: "number",
    cell: (row) => reward(row.reward),
    by: (row) => row.reward ?? -Infinity,
  },
  { name: "age", title: "Duration", kind: "number age", cell: (row) => seconds(ageOf(row)), by: ageOf },
  {
    name: "turns",
    title: "Messages",
    kind: "number widest",
    cell: (row) => count(row.turns || null),
    by: (row) => row.turns,
  },
  {
    name: "tokens",
    title: "Tokens",
    kind: "number wide",
    cell: (row) => count(row.tokens || null),
    by: (row) => row.tokens,
  },
  { name: "attempt", title: "Attempt", kind: "number widest", cell: (row) => row.attempt, by: (row) => row.attempt },
  { name: "node", title: "Node", kind: "text wide", cell: (row) => row.node || NOTHING, by: (row) => row.node },
  {
    name: "backend",
    title: "Backend",
    kind: "text wide",
    cell: (row) => row.backend || NOTHING,
    by: (row) => row.backend,
  },
  {
    name: "accepted_at",
    title: "Accepted",
    kind: "number wider accepted",
    cell: (row) => clock(row.accepted_at),
    by: (row) => row.accepted_at,
  },
];
const CHOICES = ["task", "code", "node", "backend"];
const AGES_EVERY_MS = 1000;

export function jobs(context) {
  let query = context.query.get("q") ?? "";
  let sort = context.query.get("sort") ?? "accepted_at";
  let descending = context.query.get("up") === null;
  let change = -1;

  const search = h("input", {
    type: "search",
    id: "search",
    value: query,
    placeholder: "Words, task:math, longer:30s …  ( / )",
    title: HELP,
    "aria-label": "Search jobs",
    "aria-describedby": "search-help",
    autocomplete: "off",
    spellcheck: "false",
    oninput: () => {
      query = search.value;
      filtered();
    },
  });
  const choices = new Map(
    ["state", ...CHOICES].map((place) => [
      place,
      h("select", {
        "aria-label": place,
        onchange: (event) => {
          search.value = query = withPlace(query, place, event.target.value);
          filtered();
        },
      }),
    ]),
  );
  const shown = h("p", { class: "quiet small", role: "status" });
  const none = h("p", { class: "note" });
  const table = new VirtualTable("Jobs", COLUMNS, (row) => `#/jobs/${encodeURIComponent(row.job_id)}`, sortBy);
  const element = h(
    "div",
    { class: "jobs" },
    h("div", { class: "tools" }, h("h1", null, "Jobs"), search, [...choices.values()], shown),
    h("p", { id: "search-help", class: "hidden" }, HELP),
    none,
    table.element,
  );

  function sortBy(name) {
    descending = sort === name ? !descending : true;
    sort = name;
    filtered();
  }

  function filtered() {
    const by = COLUMNS.find((column) => column.name === sort)?.by ?? COLUMNS.at(-1).by;
    const passes = filterOf(query, ageOf);
    const found = [];
    for (const row of store.rows.values()) if (passes(row)) found.push([by(row), row]);
    found.sort(([one], [other]) => (one < other ? -1 : one > other ? 1 : 0));
    if (descending) found.reverse();
    table.show(
      found.map(([, row]) => row),
      sort,
      descending,
    );
    none.hidden = found.length > 0;
    table.element.hidden = !found.length;
    none.textContent = store.rows.size ? `No job is like that. ${HELP}.` : "No job is known yet.";
    shown.textContent = `${count(found.length)} of ${count(store.rows.size)}`;
    fillChoices();
    const place = new URLSearchParams({ ...(query && { q: query }), sort, ...(!descending && { up: "" }) });
    history.replaceState(null, "", `#/jobs?${place}`);
  }

  function fillChoices() {
    fillChoice("state", STATES);
    for (const place of CHOICES) {
      const values = new Set();
      for (const row of store.rows.values()) if (row[place]) values.add(row[place]);
      fillChoice(place, [...values].sort().slice(0, 200));
    }
  }

  // One with nothing to choose from is hidden; what the search names is a choice, even if no job is like that.
  function fillChoice(place, values) {
    const select = choices.get(place);
    const chosen = placeOf(query, place);
    const options = ["", ...(chosen && !values.includes(chosen) ? [chosen] : []), ...values];
    select.hidden = options.length === 1;
    if ([...select.options].map((option) => option.value).join("\n") !== options.join("\n"))
      select.replaceChildren(...options.map((value) => h("option", { value }, value ? words(value) : `any ${place}`)));
    select.value = chosen;
  }

  function update() {
    if (change === store.change) return;
    change = store.change;
    filtered();
  }

  // Durations grow by themselves.
  const timer = setInterval(() => {
    if (document.hidden) return;
    if (sort === "age" || /(longer|shorter):/.test(query)) filtered();
    else table.redraw();
  }, AGES_EVERY_MS);
  return {
    element,
    title: "Jobs",
    update,
    close: () => {
      clearInterval(timer);
      table.close();
    },
    search,
  };
}
