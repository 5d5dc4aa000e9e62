// What the page knows of the service: the overview, and a row per job, kept up to date by the stream.

import { Stream } from "./stream.js";

class Store {
  overview = null;
  rows = new Map();
  change = 0; // counts the changes of rows
  state = "lost";
  why = "Connecting …";
  #listeners = new Set();
  #stream = null;
  #due = false;

  stop() {
    this.#stream?.stop();
    this.rows.clear();
    this.overview = null;
  }

  start() {
    this.stop();
    this.#stream = new Stream(
      "/v1/watch",
      (event) => this.take(event),
      (state, why) => {
        if (state === this.state && why === this.why) return;
        this.state = state;
        this.why = why;
        this.#tell();
      },
    );
  }

  // Returns what ends the subscription.
  subscribe(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  take({ overview, fields, rows, forgotten, reset }) {
    if (reset) this.rows.clear();
    for (const id of forgotten ?? []) this.rows.delete(id);
    if (overview) this.overview = overviewOf(overview);
    for (const values of rows ?? []) {
      const row = Object.fromEntries(fields.map((name, index) => [name, values[index]]));
      row.state = stateOf(row);
      row.text = [row.job_id, row.task, row.group_id, row.state, row.code, row.node, row.backend]
        .join(" ")
        .toLowerCase();
      this.rows.set(row.job_id, row);
    }
    if (reset || rows?.length || forgotten?.length) this.change += 1;
    this.#tell();
  }

  // Views draw once per frame, however many events came.
  #tell() {
    if (this.#due) return;
    this.#due = true;
    requestAnimationFrame(() => {
      this.#due = false;
      for (const listener of this.#listeners) listener();
    });
  }
}

export const store = new Store();

function overviewOf(seen) {
  seen.ended = seen.ended.map(([at, seconds, outcomes]) => ({ at, seconds, outcomes }));
  seen.backends?.backends.sort((one, other) =>
    one.backend.backend_id.localeCompare(other.backend.backend_id, "en", { numeric: true }),
  );
  return seen;
}

// One word for where a job is: an outcome, "queued", or the phase that it is in.
function stateOf(row) {
  if (row.place === "ended") return row.outcome ?? "ended";
  return row.place === "queued" ? "queued" : row.phase;
}

export const now = () => Date.now() / 1000;
export const ageOf = (row) => (row.ended_at ?? now()) - row.accepted_at;
