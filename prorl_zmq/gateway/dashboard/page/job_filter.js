// Which jobs the table shows. Words are looked for everywhere; `task:math`, `node:gpu-1`, `longer:30s` in one place.

const PLACES = ["state", "task", "code", "node", "backend", "group", "job"];
const FIELD_OF = { group: "group_id", job: "job_id" };
const UNITS = { "": 1, s: 1, m: 60, h: 3600 };
const ENDED = new Set(["completed", "failed", "infrastructure_error", "timeout", "cancelled"]);

export const HELP = "Words, or task: state: code: node: backend: group: job: longer: shorter: (longer:30s)";

// Returns a function that says whether a row passes; `ageOf(row)` is a job's duration in seconds.
export function filterOf(query, ageOf) {
  const checks = query
    .trim()
    .toLowerCase()
    .split(/\s+/)
    .filter(Boolean)
    .map((word) => checkOf(word, ageOf));
  return (row) => checks.every((check) => check(row));
}

function checkOf(word, ageOf) {
  const [, place, wanted] = /^([a-z]+):(.*)$/.exec(word) ?? [];
  const time = /^([0-9.]+)([smh]?)$/.exec(wanted ?? "");
  if (place === "longer" && time) return (row) => ageOf(row) > time[1] * UNITS[time[2]];
  if (place === "shorter" && time) return (row) => ageOf(row) < time[1] * UNITS[time[2]];
  if (place === "state" && wanted === "ended") return (row) => ENDED.has(row.state);
  if (place === "state" && wanted === "open") return (row) => !ENDED.has(row.state);
  if (PLACES.includes(place)) {
    const field = FIELD_OF[place] ?? place;
    return (row) => String(row[field]).toLowerCase().startsWith(wanted);
  }
  return (row) => row.text.includes(word);
}

// The query with one place set, or taken out of it.
export function withPlace(query, place, wanted) {
  const words = query
    .trim()
    .split(/\s+/)
    .filter((word) => word && !word.startsWith(`${place}:`));
  return [...words, ...(wanted ? [`${place}:${wanted}`] : [])].join(" ");
}

export function placeOf(query, place) {
  const word = query
    .trim()
    .split(/\s+/)
    .find((each) => each.startsWith(`${place}:`));
  return word ? word.slice(place.length + 1) : "";
}
