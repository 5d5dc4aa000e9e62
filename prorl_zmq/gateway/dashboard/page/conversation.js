// What was said in a rollout: a card for each turn, with its role, its text and its tool calls.

import { h } from "./dom.js";
import { count } from "./format.js";

const SHOWN_LETTERS = 6_000;
const PIECE_LETTERS = 20_000;

export function conversation(transcript) {
  if (!transcript.turns.length) return h("p", { class: "quiet" }, "It ended before its first token.");
  return h("ol", { class: "turns" }, conversationTurns(transcript));
}

// A card for each turn, behind so many turns of the policy.
export function conversationTurns(transcript, before = 0) {
  let turn = before;
  return transcript.turns.map((each) => {
    if (each.role === "assistant") turn += 1;
    const tokens = `${count(each.end - each.start)} tokens`;
    return h(
      "li",
      { class: `turn is-${each.role}` },
      h(
        "header",
        null,
        h("b", null, each.role),
        each.conversation ? h("span", { class: "small" }, each.conversation) : null,
        each.reward == null ? null : h("span", { class: "small" }, `reward ${each.reward}`),
        h("span", { class: "quiet small" }, each.role === "assistant" ? `turn ${turn}, ${tokens}` : tokens),
      ),
      each.text == null
        ? h("p", { class: "quiet" }, "No tokenizer was there to read it.")
        : longText(withoutCalls(each)),
      each.calls.map(call),
    );
  });
}

// Calls have cards of their own; as the policy wrote them they are among the tokens.
function withoutCalls({ text, calls }) {
  const at = calls.length ? text.indexOf("<tool_call>", text.indexOf("</think>") + 1) : -1;
  return at < 0 ? text : text.slice(0, at);
}

function call({ name, arguments: given }) {
  let shown = given ?? "";
  try {
    const values = Object.entries(JSON.parse(shown));
    shown = values
      .map(([key, value]) => `${key}: ${typeof value === "string" ? value : JSON.stringify(value, null, 1)}`)
      .join("\n");
  } catch {
    /* It is the feedback on a call that could not be read. */
  }
  return h(
    "div",
    { class: "call" },
    h(
      "header",
      null,
      h("span", { class: "quiet small" }, name ? "calls" : "a call that could not be read"),
      name ? h("b", null, name) : null,
    ),
    longText(shown),
  );
}

// A text, of which a long one is shown by its beginning until the reader wants all of it.
export function longText(text) {
  const pre = h("pre", { class: "said", dir: "auto" }, marked(text.slice(0, SHOWN_LETTERS)));
  if (text.length <= SHOWN_LETTERS) return pre;
  const more = h(
    "button",
    {
      type: "button",
      class: "more",
      onclick: () => {
        const pieces = [];
        // Pieces out of view cost the browser nothing.
        for (let at = 0; at < text.length; at += PIECE_LETTERS) {
          pieces.push(h("span", { class: "piece" }, marked(text.slice(at, at + PIECE_LETTERS))));
        }
        pre.replaceChildren(...pieces);
        more.remove();
      },
    },
    `Show all ${count(text.length)} letters`,
  );
  return [pre, more];
}

const MARK = /(<\|[^|>\s]{1,40}\|>(?:(?:system|user|assistant|tool)\n)?)/;
const marked = (text) => text.split(MARK).map((part, index) => (index % 2 ? h("span", { class: "mark" }, part) : part));
