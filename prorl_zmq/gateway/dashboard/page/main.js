// Where the page starts: the key, the stream, and which view an address shows. An address is `#/view/part?query`.

import { key, setKey } from "./api.js";
import { h, link } from "./dom.js";
import { compact } from "./format.js";
import { keyForm } from "./key_form.js";
import { session } from "./session.js";
import { store } from "./store.js";
import { startTheme } from "./theme.js";
import { backends } from "./views/backends.js";
import { batch } from "./views/batch.js";
import { batches } from "./views/batches.js";
import { job } from "./views/job.js";
import { jobs } from "./views/jobs.js";
import { nodes } from "./views/nodes.js";
import { overview } from "./views/overview.js";
import { run } from "./views/run.js";
import { runs } from "./views/runs.js";
import { training } from "./views/training.js";

const VIEWS = [
  ["", "Overview", overview],
  ["jobs", "Jobs", jobs, job],
  ["batches", "Batches", batches, batch],
  ["training", "Training", training],
  ["nodes", "Nodes", nodes],
  ["backends", "Backends", backends],
  ["runs", "Runs", runs, run],
];
const STATES = { live: "live", lost: "reconnecting", refused: "not allowed" };

const main = document.getElementById("main");
const nav = document.getElementById("nav");
const state = document.getElementById("state");
const leave = document.getElementById("leave");
let view = null;
let drawnNav = "";

// An address may come from anywhere: what cannot be decoded stays as it is.
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function address() {
  const [place, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { parts: place.split("/").map(decoded), query: new URLSearchParams(query ?? "") };
}

function show() {
  const {
    parts: [name, ...path],
    query,
  } = address();
  view?.close();
  const [, , list, one] = VIEWS.find(([each]) => each === name) ?? VIEWS[0];
  view = (path.length && one ? one : list)({ path, query });
  document.title = `${view.title} · prorl`;
  main.replaceChildren(view.element);
  main.className = name || "overview";
  drawnNav = "";
  update();
  const tab = nav.querySelector("[aria-current]");
  if (tab) nav.scrollLeft = tab.offsetLeft - nav.offsetLeft - (nav.clientWidth - tab.offsetWidth) / 2;
  main.scrollTo(0, 0);
  window.scrollTo(0, 0);
}

function update() {
  showNav();
  state.className = `is-${store.state}`;
  const text = STATES[store.state];
  if (state.textContent !== text) state.textContent = text;
  state.title = store.why;
  view?.update();
}

function showNav() {
  const current = address().parts[0];
  const counts = {
    jobs: store.rows.size,
    batches: store.overview?.status?.batches.length,
    nodes: store.overview?.nodes.length,
    backends: store.overview?.backends?.backends.length,
  };
  const drawn = JSON.stringify([current, counts]);
  if (drawn === drawnNav) return;
  drawnNav = drawn;
  const focused = document.activeElement?.getAttribute("href");
  nav.replaceChildren(
    ...VIEWS.map(([name, title], index) =>
      link(
        `#/${name}`,
        { "aria-current": name === current ? "page" : null, title: `${title} (key ${index + 1})` },
        title,
        counts[name] ? h("span", { class: "count" }, compact(counts[name])) : null,
      ),
    ),
  );
  if (focused && !document.contains(document.activeElement?.closest?.("nav")))
    nav.querySelector(`[href="${CSS.escape(focused)}"]`)?.focus();
}

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && event.target.matches?.("input[type=search]")) return event.target.blur();
  if (event.target.matches?.("input:not([type=radio], [type=checkbox]), select, textarea")) return;
  if (event.key === "/") {
    event.preventDefault();
    if (view.search) view.search.focus();
    else {
      location.hash = "#/jobs";
      setTimeout(() => view.search?.focus(), 50);
    }
  } else if (VIEWS[event.key - 1]) location.hash = `#/${VIEWS[event.key - 1][0]}`;
}

async function begin() {
  const given = /^#key=(.+)$/.exec(location.hash);
  if (given) {
    setKey(decoded(given[1]));
    history.replaceState(null, "", "#/");
  }
  try {
    await session.load();
  } catch (error) {
    if (error.status === 401) return askForKey(error.message);
    main.replaceChildren(h("p", { class: "note warn", role: "alert" }, error.message));
    setTimeout(begin, 2000);
    return;
  }
  leave.hidden = !key();
  nav.hidden = false;
  store.start();
  show();
}

function askForKey(message) {
  view?.close();
  view = null;
  store.stop();
  nav.hidden = leave.hidden = true;
  state.textContent = "";
  main.className = "key";
  main.replaceChildren(
    keyForm(key() ? message : "", (given) => {
      setKey(given);
      begin();
    }),
  );
  main.querySelector("input").focus();
}

startTheme(document.getElementById("theme"));
leave.addEventListener("click", () => {
  setKey("");
  begin();
});
document.addEventListener("keyrefused", () => {
  if (view) begin();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
window.addEventListener("hashchange", () => (location.hash.startsWith("#key=") ? begin() : view && show()));
window.addEventListener("keydown", pressed);
store.subscribe(update);
begin();
