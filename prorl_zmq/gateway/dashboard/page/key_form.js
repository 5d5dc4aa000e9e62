// What a viewer without a key sees, and nothing else.

import { h } from "./dom.js";

export function keyForm(problem, onKey) {
  const input = h("input", { type: "password", id: "key", autocomplete: "off", spellcheck: "false", required: true });
  return h(
    "form",
    {
      class: "card",
      onsubmit: (event) => {
        event.preventDefault();
        onKey(input.value.trim());
      },
    },
    h("h1", null, "This dashboard asks for a key"),
    h("label", { for: "key" }, "Key"),
    input,
    problem ? h("p", { class: "note bad", role: "alert" }, problem) : null,
    h("button", { type: "submit" }, "Open"),
    h(
      "p",
      { class: "quiet small" },
      "It is printed behind #key= by prorl dashboard; or, for a service with keys, a token that ",
      h("code", null, "prorl keys bearer NAME --role operator"),
      " makes. It stays in this tab.",
    ),
  );
}
