// The live stream: server-sent events read by `fetch`, which can send the key in a header, as `EventSource` cannot.
// When it breaks off it is opened again, a little later each time.

import { open } from "./api.js";

const SILENT_MS = 15_000; // the gateway says something every 5 s
const LONGEST_WAIT_MS = 5_000;

export class Stream {
  #stopped = false;
  #controller = null;

  // `onEvent` gets each event's data; `onState` gets "live", "lost" or "refused", and why.
  constructor(path, onEvent, onState) {
    this.path = path;
    this.onEvent = onEvent;
    this.onState = onState;
    this.#run();
  }

  stop() {
    this.#stopped = true;
    this.#controller?.abort();
  }

  async #run() {
    let wait = 500;
    while (!this.#stopped) {
      try {
        await this.#read(() => {
          wait = 500;
        });
        this.onState("lost", "The connection ended.");
      } catch (error) {
        if (this.#stopped) return;
        if (error.status === 401 || error.status === 403) return this.onState("refused", error.message);
        this.onState("lost", error.name === "AbortError" ? "Nothing was heard for a while." : error.message);
      }
      await new Promise((resolve) => setTimeout(resolve, wait));
      wait = Math.min(2 * wait, LONGEST_WAIT_MS);
    }
  }

  async #read(heard) {
    const controller = (this.#controller = new AbortController());
    const watch = () => setTimeout(() => controller.abort(), SILENT_MS);
    let timer = watch();
    try {
      const response = await open(this.path, { signal: controller.signal });
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let parts = [];
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        clearTimeout(timer);
        timer = watch();
        heard();
        // The end of an event may itself be cut in two.
        const pieces = (parts.at(-1)?.endsWith("\n") ? parts.pop() + value : value).split("\n\n");
        for (const piece of pieces.slice(0, -1)) {
          this.#event([...parts, piece].join(""));
          parts = [];
        }
        parts.push(pieces.at(-1));
      }
    } finally {
      clearTimeout(timer);
    }
  }

  #event(text) {
    const data = text
      .split("\n")
      .filter((line) => line.startsWith("data:"))
      .map((line) => line.slice(5))
      .join("\n");
    this.onState("live", "");
    if (data) this.onEvent(JSON.parse(data));
  }
}
