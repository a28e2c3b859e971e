// The conversation. Model text only ever becomes the data of text nodes.

import { ApiError, chat } from "/web/api.js";

const byId = (id) => document.getElementById(id);
const STICK_PX = 60;

export class Chat {
  #messages = [];
  #abort = null;
  #key;
  #onModel;

  constructor({ key, onModel }) {
    this.#key = key;
    this.#onModel = onModel;
    const prompt = byId("prompt");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    prompt.addEventListener("input", fit);
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#stop();
    });
    byId("stop").addEventListener("click", () => this.#stop());
    byId("clear").addEventListener("click", () => this.#clear());
  }

  #stop() {
    this.#abort?.abort();
  }

  #clear() {
    this.#messages = [];
    for (const article of byId("log").querySelectorAll("article")) article.remove();
    byId("empty").hidden = false;
    byId("clear").disabled = true;
    byId("prompt").focus();
  }

  async #send() {
    const prompt = byId("prompt");
    const text = prompt.value;
    if (this.#abort || !text.trim()) return;
    if (!byId("composer").reportValidity()) return;
    prompt.value = "";
    fit();
    byId("empty").hidden = true;
    addMessage("user", "You").write(text);
    const asked = { role: "user", content: text };
    const answer = addMessage("assistant", "Model");
    this.#busy(true);
    this.#abort = new AbortController();
    const outcome = await run(
      { messages: [...system(), ...this.#messages, asked], ...parameters() },
      this.#key(),
      this.#abort.signal,
      answer,
      this.#onModel,
    );
    this.#abort = null;
    this.#busy(false);
    if (outcome.failed) {
      // The turn did not happen; what was typed is not lost.
      if (!prompt.value) prompt.value = text;
      fit();
    } else {
      this.#messages.push(asked, { role: "assistant", content: outcome.text });
      byId("announce").textContent = outcome.said;
    }
    prompt.focus();
  }

  #busy(on) {
    byId("send").hidden = on;
    byId("stop").hidden = !on;
    byId("clear").disabled = on;
    // Read aloud once it is whole, not word by word.
    byId("log").setAttribute("aria-busy", String(on));
    if (on) byId("announce").textContent = "";
  }
}

async function run(body, key, signal, answer, onModel) {
  const beganAt = performance.now();
  let text = "", finish = null, firstAt = 0, lastAt = 0, firstTokens = 0, tokens = 0;
  const figures = () => {
    const told = [];
    if (firstAt) told.push(`first token after ${milliseconds(firstAt - beganAt)}`);
    if (tokens > firstTokens && lastAt > firstAt) {
      told.push(`${(((tokens - firstTokens) * 1000) / (lastAt - firstAt)).toFixed(1)} tokens/s`);
    }
    if (tokens) told.push(`${tokens} tokens`);
    return told;
  };
  try {
    for await (const event of chat(body, key, signal)) {
      if (event.tokens > tokens) {
        lastAt = performance.now();
        tokens = event.tokens;
        if (!firstAt) [firstAt, firstTokens] = [lastAt, tokens];
      }
      text += event.text;
      finish = event.finish ?? finish;
      onModel(event.model);
      answer.write(event.text);
      answer.tell(figures().join(" · "));
    }
  } catch (error) {
    if (error.name === "AbortError") {
      answer.end([...figures(), "stopped"].join(" · "));
      return { failed: !text, text, said: "Stopped." };
    }
    if (!(error instanceof ApiError)) throw error;
    answer.end(figures().join(" · "));
    answer.fail(error.message);
    return { failed: true };
  }
  const end = finish === "length" ? ["ended at max tokens"] : [];
  answer.end([...figures(), ...end].join(" · "));
  return { failed: false, text, said: `Answer complete, ${tokens} tokens.` };
}

function addMessage(kind, author) {
  const log = byId("log");
  const article = element("article", kind);
  const text = element("div", "text");
  const node = document.createTextNode("");
  const meta = element("p", "meta");
  const title = element("h3");
  title.textContent = author;
  text.append(node);
  article.append(title, text);
  if (kind === "assistant") {
    article.classList.add("streaming");
    article.append(meta);
  }
  log.append(article);
  log.scrollTop = log.scrollHeight;

  let pending = "", told = "", frame = 0;
  const flush = () => {
    frame = 0;
    const sticks = log.scrollHeight - log.scrollTop - log.clientHeight < STICK_PX;
    node.appendData(pending);
    pending = "";
    meta.textContent = told;
    if (sticks) log.scrollTop = log.scrollHeight;
  };
  // Tokens may come faster than the screen is drawn.
  const schedule = () => {
    frame ||= requestAnimationFrame(flush);
  };
  return {
    write(more) {
      pending += more;
      if (kind === "assistant") schedule();
      else flush();
    },
    tell(line) {
      told = line;
      schedule();
    },
    end(line) {
      told = line;
      cancelAnimationFrame(frame);
      article.classList.remove("streaming");
      flush();
    },
    fail(message) {
      const error = element("p", "error");
      error.setAttribute("role", "alert");
      error.textContent = message;
      article.append(error);
      log.scrollTop = log.scrollHeight;
    },
  };
}

function element(name, className = "") {
  const made = document.createElement(name);
  made.className = className;
  return made;
}

function system() {
  const content = byId("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}

function parameters() {
  const fields = { max_tokens: "max-tokens", temperature: "temperature", top_p: "top-p", seed: "seed" };
  const given = {};
  for (const [name, id] of Object.entries(fields)) {
    const value = byId(id).valueAsNumber;
    if (!Number.isNaN(value)) given[name] = value;
  }
  return given;
}

function milliseconds(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`;
}

function fit() {
  const prompt = byId("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}
