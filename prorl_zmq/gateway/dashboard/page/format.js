// How values are written. `visible` makes every foreign text harmless to the eye: control characters, terminal escapes,
// marks that turn the direction of writing and what has no width are shown as signs, never obeyed. Joiners and the
// choice of a glyph stay, since scripts and emoji need them.

const HIDDEN =
  /(?![\u200c\u200d\ufe00-\ufe0f])[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u2028\u2029\p{Default_Ignorable_Code_Point}]/gu;

export function visible(text) {
  return String(text).replace(HIDDEN, (sign) => {
    const code = sign.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    if (code === 0x7f) return "\u2421";
    return `\u27e8${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
  });
}

export const NOTHING = "–";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumFractionDigits: 1, notation: "compact" });

export const count = (value) => (value == null ? NOTHING : whole.format(value));
export const number = (value, thing) => `${count(value)} ${thing}${value === 1 ? "" : "s"}`;
export const compact = (value) => (value == null ? NOTHING : short.format(value));

export function rate(value) {
  if (value == null) return NOTHING;
  return value >= 100 ? whole.format(value) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export function percent(value, digits = 1) {
  return value == null ? NOTHING : `${(100 * value).toFixed(digits)} %`;
}

export function reward(value) {
  if (value == null) return NOTHING;
  return Number.isInteger(value) ? String(value) : value.toFixed(3);
}

export function seconds(value) {
  if (value == null) return NOTHING;
  if (value < 0.9995) return `${Math.round(1000 * Math.max(0, value))} ms`;
  if (value < 9.95) return `${value.toFixed(1)} s`;
  if (value < 60) return `${Math.round(value)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} m ${pad(Math.floor(value % 60))} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${pad(minutes % 60)} m` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export const ago = (value) => (value == null ? NOTHING : `${seconds(value)} ago`);

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytesOf(part, whole) {
  const { power, name } = unitOf(whole);
  return `${inUnits(part, power)} of ${inUnits(whole, power)} ${name}`;
}

export function bytes(value) {
  const { power, name } = unitOf(value);
  return `${inUnits(value, power)} ${name}`;
}

function unitOf(value) {
  const power = Math.min(UNITS.length - 1, Math.floor(Math.log2(Math.max(value, 1)) / 10));
  return { power, name: UNITS[power] };
}

const inUnits = (value, power) => (value / 1024 ** power).toPrecision(3).replace(/\.0+$/, "");

export function clock(unixSeconds) {
  const time = new Date(1000 * unixSeconds);
  const date = `${time.getFullYear()}-${pad(time.getMonth() + 1)}-${pad(time.getDate())}`;
  const day = time.toDateString() === new Date().toDateString() ? "" : `${date} `;
  return `${day}${pad(time.getHours())}:${pad(time.getMinutes())}:${pad(time.getSeconds())}`;
}

export const words = (name) => name.replaceAll("_", " ");
// A session as people named it; of a random id, some digits.
export const sessionName = (session) => (/^[0-9a-f]{32}$/.test(session) ? shortId(session) : session);
export const shortId = (id) => (id.length > 18 ? `${id.slice(0, 6)}…${id.slice(-10)}` : id);

function pad(number) {
  return String(number).padStart(2, "0");
}
