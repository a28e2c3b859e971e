// Puts the page together.

import { Chat } from "/web/chat.js";
import { LiveView } from "/web/live.js";

const byId = (id) => document.getElementById(id);
const KEY = "pagewire-api-key";
const WORDS = { locked: "needs an API key", forbidden: "connected", down: "unreachable" };

const key = byId("key");
// Ends with the tab; nothing is kept on disk.
key.value = sessionStorage.getItem(KEY) ?? "";
const currentKey = () => key.value.trim();

function showModel(name) {
  if (name) byId("model").textContent = name;
}

function showState(state) {
  const status = byId("status");
  const shown = { serving: "serving", forbidden: "serving" }[state] ?? "down";
  // Set only where it changes: screen readers read what is set.
  if (status.dataset.told === state) return;
  status.dataset.told = state;
  status.dataset.state = shown;
  status.textContent = WORDS[state] ?? state;
  byId("key-note").textContent = state === "locked" ? keyNote() : "";
  if (state === "locked") byId("settings").open = true;
}

function keyNote() {
  return currentKey() ? "The server does not know this key." : "This server asks for an API key.";
}

new Chat({ key: currentKey, onModel: showModel });
const live = new LiveView({ key: currentKey, onState: showState, onModel: showModel });

key.addEventListener("change", () => {
  sessionStorage.setItem(KEY, currentKey());
  byId("status").dataset.told = "";
  live.ask();
});

for (const button of document.querySelectorAll("nav button")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.show;
    for (const other of document.querySelectorAll("nav button")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
  });
}

live.ask();
byId("prompt").focus();
