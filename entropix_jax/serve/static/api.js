// Requests to this page's own server: JSON, files, streams of events. Errors have one line for the reader.

const KEY = "entropix-jax-key";
const LOST = "The connection to the server was lost, and the text ends here: start the server again if it has stopped, then continue the text.";

// The characters that an HTTP header can carry.
export const isKey = (text) => /^[\x21-\x7e]+$/.test(text);

// Resolves after some seconds; rejects when the signal aborts.
const pause = (seconds, signal) => new Promise((resolve, reject) => {
  setTimeout(resolve, 1000 * seconds);
  signal.addEventListener("abort", () => reject(signal.reason));
});

export class Api {
  // `askKey(problem)` resolves to a key that the reader types, and rejects if the reader cancels.
  constructor(askKey) {
    this.askKey = askKey;
    this.server = null; // when it started; null: unknown
    this.lose = () => {}; // called when the connection is lost
  }

  async ask(path, { method = "GET", json, signal } = {}) {
    const headers = {};
    const key = sessionStorage.getItem(KEY);
    if (key) headers.Authorization = `Bearer ${key}`;
    if (json !== undefined) headers["Content-Type"] = "application/json";
    let answer;
    try {
      answer = await fetch(path, { method, headers, body: JSON.stringify(json), signal });
    } catch (error) {
      throw this.problemOf(error, "The server does not answer: start it again if it has stopped.");
    }
    if (answer.status === 401) {
      const now = sessionStorage.getItem(KEY);
      if (!now || now === key) await this.newKey(key ? "The server refuses this key." : "");
      return this.ask(path, { method, json, signal });
    }
    if (!answer.ok) {
      const told = await answer.json().catch(() => null);
      const error = new Error(told?.error?.message ?? `The server answered ${answer.status}.`);
      if (told?.error?.code === "compiling") error.wait = Number(answer.headers.get("Retry-After"));
      error.code = told?.error?.code;
      throw error;
    }
    return answer;
  }

  // Whether the server has a text's row. A server that was started again has none of the old ones.
  has(node) {
    return Boolean(node?.row) && node.server === this.server;
  }

  problemOf(error, words) {
    if (error.name === "AbortError") return error;
    this.server = null;
    this.lose();
    return new Error(words);
  }

  // Opens one dialog for all requests that wait for the key.
  newKey(problem) {
    sessionStorage.removeItem(KEY);
    this.asking ??= this.askKey(problem).then((key) => sessionStorage.setItem(KEY, key)).finally(() => (this.asking = null));
    return this.asking;
  }

  async get(path) {
    return (await this.ask(path)).json();
  }

  // The values of a stream's events. A comment says why nothing comes: `{ comment, choices: [] }`.
  // Repeats the request while the server compiles its programs.
  async *stream(path, json, signal) {
    let answer = null;
    while (!answer) {
      try {
        answer = await this.ask(path, { method: "POST", json: { ...json, stream: true }, signal });
      } catch (error) {
        if (!error.wait) throw error;
        yield { comment: error.message.replace("try again later", `the page tries again in ${error.wait} s`), choices: [] };
        await pause(error.wait, signal);
      }
    }
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        throw this.problemOf(error, LOST);
      });
      if (done) throw this.problemOf({}, LOST);
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        if (event.startsWith(": ")) {
          yield { comment: event.slice(2), choices: [] };
          continue;
        }
        const data = event.slice("data: ".length);
        if (data === "[DONE]") return;
        const told = JSON.parse(data);
        if (told.error) throw new Error(told.error.message);
        yield told;
      }
    }
  }
}
