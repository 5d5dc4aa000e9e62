// What the page asks the gateway. The key stays in this tab (sessionStorage) and goes in a header: there is no cookie
// that another page could make use of.

const KEY = "prorl.key";

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const key = () => sessionStorage.getItem(KEY) ?? "";
export const setKey = (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY));

function refused(message) {
  document.dispatchEvent(new CustomEvent("keyrefused", { detail: key() }));
  return new ApiError(401, "not_allowed", message);
}

export async function open(path, options = {}) {
  // A header could not even carry it.
  if (!/^[\x20-\x7e]*$/.test(key())) throw refused("No key has such letters.");
  const headers = key() ? { Authorization: `Bearer ${key()}` } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "away", "The dashboard's process does not answer. Is it running?");
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  const error = told?.error ?? { code: "http", message: response.statusText };
  if (response.status === 401) throw refused(error.message);
  throw new ApiError(response.status, error.code, error.message);
}

export const get = async (path) => (await open(path)).json();
export const send = async (method, path) => (await open(path, { method })).json();
export const part = encodeURIComponent;
