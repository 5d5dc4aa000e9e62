// The last turns of a job that has not ended. Turns that are shown stay as they are, so that what was opened or scrolled
// stays too; a reader at the end of the page stays there.

import { conversationTurns } from "./conversation.js";
import { card, h } from "./dom.js";
import { count, number, visible } from "./format.js";

const NEAR_PX = 60;

export class LiveTurns {
  #status = h("p", { class: "quiet", role: "status" });
  #problem = h("p", { class: "note warn", role: "alert", hidden: true });
  #list = h("ol", { class: "turns" });
  #attempt = 0;
  #tokens = 0;
  element = card("Conversation so far", { class: "live" }, this.#problem, this.#status, this.#list);
  turns = null; // of the policy
  steps = [];

  // What is asked: no more is sent than is not known.
  get query() {
    return `attempt=${this.#attempt}&tokens=${this.#tokens}`;
  }

  get tokens() {
    return this.#tokens;
  }

  fail(message) {
    this.#problem.hidden = !message;
    this.#problem.textContent = visible(message);
  }

  // As the gateway tells it.
  show(live) {
    const { so_far: soFar, transcript } = live;
    this.fail(live.problem);
    if (live.attempt !== this.#attempt || !soFar) this.#forget(live.attempt);
    if (transcript) {
      this.steps = soFar.steps;
      this.#tokens = soFar.tokens;
      this.#showTurns(transcript, soFar);
    }
    this.#status.textContent = this.#told(live);
  }

  #forget(attempt) {
    this.#attempt = attempt;
    this.#tokens = 0;
    this.turns = null;
    this.steps = [];
    this.#list.replaceChildren();
  }

  #showTurns(transcript, soFar) {
    const page = document.scrollingElement;
    const atEnd = this.#list.children.length && page.scrollHeight - page.scrollTop - page.clientHeight < NEAR_PX;
    const first = soFar.tokens - soFar.shown_tokens;
    const shown = new Map([...this.#list.children].map((item) => [item.dataset.key, item]));
    const items = conversationTurns(transcript, soFar.policy_turns_before).map((item, index) => {
      const { start, end } = transcript.turns[index];
      item.dataset.key = `turn ${first + start} ${first + end}`;
      return shown.get(item.dataset.key) ?? item;
    });
    const kept = new Set(items);
    for (const item of shown.values()) if (!kept.has(item)) item.remove();
    items.forEach((item, index) => {
      if (this.#list.children[index] !== item) this.#list.insertBefore(item, this.#list.children[index] ?? null);
    });
    this.turns = soFar.policy_turns_before + transcript.turns.filter(({ role }) => role === "assistant").length;
    if (atEnd) page.scrollTop = page.scrollHeight;
  }

  #told({ phase, place, node, so_far: soFar }) {
    if (place === "queued" && phase !== "eval" && phase !== "score") return `It waits in the queue of ${phase.toUpperCase()}.`;
    if (phase === "init") return `It is in INIT on ${node}: its conversation begins with RUN.`;
    if (!soFar?.tokens) return "Nothing has been said yet.";
    const all = `${number(soFar.turns, "message")}, ${number(soFar.tokens, "token")} so far`;
    const items = this.#list.children.length;
    if (!items) return `${all}. They are on their node until a client collects them.`;
    return items < soFar.turns ? `${all}; the last ${count(items)} messages are shown.` : `${all}.`;
  }
}
