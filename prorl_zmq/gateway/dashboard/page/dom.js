// Elements of the page. A string becomes a text node, seen through `visible`; nothing is ever read as HTML, and the
// page's security policy has the browser refuse it.

import { visible } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else element.setAttribute(name, value === true ? "" : visible(value));
  }
  element.append(...nodes(children));
  return element;
}

function nodes(children) {
  return children
    .flat(Infinity)
    .filter((child) => child != null && child !== false)
    .map((child) => (child instanceof Node ? child : document.createTextNode(visible(child))));
}

// Draw an element's content again; the focus, the scrolled tables and a text that is being marked stay.
export function redraw(element, ...children) {
  const marked = document.getSelection();
  if (marked && !marked.isCollapsed && element.contains(marked.anchorNode)) return;
  const focused = element.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const opened = new Set([...element.querySelectorAll("details[open][data-key]")].map((each) => each.dataset.key));
  const scrolled = [...element.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
  element.replaceChildren(...nodes(children));
  element.querySelectorAll(".scroll").forEach((each, index) => {
    each.scrollLeft = scrolled[index] ?? 0;
  });
  for (const each of element.querySelectorAll("details[data-key]")) each.open ||= opened.has(each.dataset.key);
  if (focused) element.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

export function link(place, attributes, ...children) {
  return h("a", { href: place, "data-key": place, ...attributes }, ...children);
}

export function card(title, attributes, ...children) {
  const heading = title instanceof Node ? title : h("h2", null, title);
  return h("section", { ...attributes, class: `card ${attributes?.class ?? ""}` }, heading, ...children);
}

// A plain table: columns are [title, class]; rows are lists of cells, which are texts or nodes.
export function table(caption, columns, rows, empty = "None.") {
  if (!rows.length) return h("p", { class: "quiet" }, empty);
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": caption, "data-key": `table ${caption}` },
    h(
      "table",
      null,
      h("caption", { class: "hidden" }, caption),
      h(
        "thead",
        null,
        h(
          "tr",
          null,
          columns.map(([title, kind]) => h("th", { scope: "col", class: kind }, title)),
        ),
      ),
      h(
        "tbody",
        null,
        rows.map((cells) =>
          h(
            "tr",
            null,
            cells.map((cell, index) => h("td", { class: columns[index][1] }, cell)),
          ),
        ),
      ),
    ),
  );
}

// One of some options, as buttons side by side; `onchoose` gets the chosen one.
export function choice(label, options, chosen, onchoose) {
  return h(
    "span",
    { class: "switch", role: "radiogroup", "aria-label": label },
    Object.entries(options).map(([value, title]) =>
      h(
        "label",
        null,
        h("input", {
          type: "radio",
          name: label,
          value,
          checked: value === String(chosen),
          "data-key": `${label} ${value}`,
          onchange: () => onchoose(value),
        }),
        title,
      ),
    ),
  );
}

export function badge(state, text = state) {
  return h("span", { class: `badge is-${state.replaceAll("_", "-")}` }, text);
}

// A bar of parts [value, class, title] of a whole.
export function bar(parts, whole, label) {
  return h(
    "span",
    { class: "bar", role: "img", "aria-label": label, title: label },
    parts
      .filter(([value]) => value > 0)
      .map(([value, kind]) => h("span", { class: kind, style: { width: `${(100 * value) / Math.max(whole, 1)}%` } })),
  );
}

// A bar and its words; `title` is said of the bar alone.
export function meter(part, whole, label, kind = "part-main", title = label) {
  return h("span", { class: "meter" }, bar([[part, kind]], whole, title), h("span", null, label));
}

export function figure(label, value, below, attributes) {
  return h(
    "div",
    { class: "figure", ...attributes },
    h("span", { class: "quiet" }, label),
    h("b", null, value),
    h("span", { class: "quiet small" }, below ?? "\u00a0"),
  );
}
