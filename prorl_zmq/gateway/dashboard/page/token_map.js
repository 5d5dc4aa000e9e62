// The tokens of a rollout as a heat map: by log-prob, by who wrote them, or by the weight version. Arrow keys move from
// token to token; the line above says all that is known of the one that is pointed at.

import { choice, h } from "./dom.js";
import { count, NOTHING } from "./format.js";

const PAGE = 2_000;
const LEVELS = [0.9, 0.5, 0.1, 0.01];
const WAYS = { logprob: "probability", mask: "mask", version: "weight version" };

export function tokenMap(transcript) {
  const total = transcript.token_ids.length;
  if (!total) return null;
  const versions = [...new Set(transcript.versions)]
    .filter((version) => version >= 0)
    .sort((one, other) => one - other);
  const pages = Math.ceil(total / PAGE);
  let page = 0;
  let way = "logprob";
  const place = h("span", { class: "small quiet" });
  const told = h("p", { class: "told", role: "status" });
  const legend = h("p", { class: "legend" });
  const tokens = h("div", {
    class: "tokens",
    dir: "auto",
    role: "group",
    "aria-label": "Tokens",
    onpointerover: (event) => tell(event.target.dataset?.at),
    onfocusin: (event) => tell(event.target.dataset?.at),
    onkeydown: move,
  });

  const ways = choice("Colour tokens by", WAYS, way, (name) => {
    way = name;
    draw();
  });
  const turn = (step) => () => {
    page = Math.max(0, Math.min(pages - 1, page + step));
    draw();
  };
  const paging =
    pages > 1
      ? [
          h("button", { type: "button", onclick: turn(-1), "aria-label": "Earlier tokens" }, "‹"),
          place,
          h("button", { type: "button", onclick: turn(1), "aria-label": "Later tokens" }, "›"),
        ]
      : [place];

  function draw() {
    const first = page * PAGE;
    const last = Math.min(total, first + PAGE);
    const spans = [];
    for (let at = first; at < last; at += 1) {
      const text = transcript.tokens ? transcript.tokens[at] : `${transcript.token_ids[at]} `;
      spans.push(
        h(
          "span",
          { class: kindOf(at), "data-at": at, tabindex: at === first ? 0 : -1 },
          text.replaceAll("\n", "⏎\n") || "·",
        ),
      );
    }
    tokens.replaceChildren(...spans);
    place.textContent = `${count(first + 1)}–${count(last)} of ${count(total)}`;
    legend.replaceChildren(...legendOf().map(([kind, name]) => h("span", null, h("i", { class: kind }), name)));
    tell(first);
  }

  function kindOf(at) {
    const isOwn = transcript.mask[at] === 1;
    if (!isOwn) return "tok given";
    if (way === "mask") return "tok own";
    if (way === "version") return `tok version-${versions.indexOf(transcript.versions[at]) % 6}`;
    return `tok ${levelOf(transcript.logprobs[at])}`;
  }

  function legendOf() {
    const given = ["tok given", "not the policy's"];
    if (way === "mask") return [["tok own", "the policy's: trained on"], given];
    if (way === "version")
      return [...versions.slice(0, 6).map((version, index) => [`tok version-${index}`, `version ${version}`]), given];
    const names = LEVELS.map((level, index) => [`tok level-${index}`, `≥ ${level}`]);
    return [...names, [`tok level-${LEVELS.length}`, `< ${LEVELS.at(-1)}`], given];
  }

  function tell(at) {
    if (at === undefined) return;
    const logprob = transcript.logprobs[at];
    const isOwn = transcript.mask[at] === 1;
    const known = [
      ["token", at],
      ["id", transcript.token_ids[at]],
      ["text", transcript.tokens ? JSON.stringify(transcript.tokens[at]) : NOTHING],
      ["by", isOwn ? "the policy" : "others"],
      ["log-prob", logprob == null ? NOTHING : logprob.toFixed(4)],
      ["probability", logprob == null ? NOTHING : Math.exp(logprob).toPrecision(3)],
      ["version", isOwn ? transcript.versions[at] : NOTHING],
    ];
    told.replaceChildren(
      ...known.map(([name, value]) =>
        h("span", null, h("span", { class: "quiet" }, `${name} `), h("code", null, value)),
      ),
    );
  }

  function move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -PAGE, End: PAGE }[event.key];
    const at = Number(event.target.dataset.at);
    if (!step || Number.isNaN(at)) return;
    event.preventDefault();
    const index = Math.max(0, Math.min(tokens.children.length - 1, at - page * PAGE + step));
    event.target.tabIndex = -1;
    tokens.children[index].tabIndex = 0;
    tokens.children[index].focus();
  }

  draw();
  return h("div", { class: "token-map" }, h("div", { class: "tools" }, ways, paging), legend, told, tokens);
}

function levelOf(logprob) {
  if (logprob == null) return "level-none";
  const level = LEVELS.findIndex((least) => Math.exp(logprob) >= least);
  return `level-${level < 0 ? LEVELS.length : level}`;
}
