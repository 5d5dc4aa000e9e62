// Who looks: the role of the key, and what it may do.

import { get } from "./api.js";

class Session {
  role = "";
  name = "";
  #may = new Set();

  async load() {
    const { role, name, may } = await get("/v1/me");
    this.role = role;
    this.name = name;
    this.#may = new Set(may);
  }

  may(what) {
    return this.#may.has(what);
  }
}

export const session = new Session();
