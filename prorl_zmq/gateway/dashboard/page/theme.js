// Light, dark, or as the system is. The choice is kept in this browser.

const NAMES = ["auto", "light", "dark"];
const SIGNS = { auto: "◐", light: "☀", dark: "☾" };
const STORED = "prorl.theme";

export function startTheme(button) {
  let name = NAMES.includes(localStorage.getItem(STORED)) ? localStorage.getItem(STORED) : "auto";
  const show = () => {
    document.documentElement.dataset.theme = name;
    button.textContent = SIGNS[name];
    button.title = `Colours: ${name === "auto" ? "as the system's" : name}`;
    button.setAttribute("aria-label", button.title);
  };
  button.addEventListener("click", () => {
    name = NAMES[(NAMES.indexOf(name) + 1) % NAMES.length];
    localStorage.setItem(STORED, name);
    show();
  });
  show();
}
