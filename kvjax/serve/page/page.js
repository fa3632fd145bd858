// The chat, its settings, and the numbers beside it. Talks to its own server alone.

import { Kept, Memory, Pool, bytes, number, times } from "./cache.js";
import { EXAMPLES } from "./examples.js";

const $ = (id) => document.getElementById(id);
const RATES = [1, 2, 4, 8, 16, 32, 64];
const ANSWER_TOKENS = 256;

const memory = new Memory(), pool = new Pool();
let key = "", status = null, turns = [], running = null, shown = null;

function make(tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

function headers() {
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

// The server

async function look() {
  try {
    const response = await fetch("kvjax/status", { headers: headers(), cache: "no-store" });
    $("key-form").hidden = response.status !== 401;
    if (response.status === 401) { $("model").textContent = "this server needs a key"; return; }
    if (!response.ok) throw new Error(`the server answers ${response.status}`);
    const first = status === null;
    status = await response.json();
    if (first) begin();
    const waits = status.compiling ? ` · waiting for compilation: ${status.compiling}` : "";
    const state = status.ready ? waits : " · warming up: the first answers wait for compilation";
    $("model").textContent = `${status.model} · ${status.layers} layers × ${status.kv_heads} KV heads · `
      + `a context of ${number(status.max_len)} tokens${state}`;
    pool.add(status);
  } catch {
    $("model").textContent = "the server cannot be reached";
  }
}

function begin() {
  const options = status.methods.filter((one) => one.name !== "full").map((one) => {
    const option = make("option", "", one.name);
    option.value = one.name;
    option.title = one.summary;
    return option;
  });
  $("method").replaceChildren(...options);
  $("method").disabled = options.length < 2;
  if (!options.length) { $("rate").disabled = $("beside").disabled = true; }
  const at = RATES.indexOf(status.rate);
  if (at >= 0) $("rate").value = at;
  settings();
  busy(false);
}

function settings() {
  const rate = RATES[$("rate").value];
  $("rate-text").textContent = rate === 1 ? "1× (keep all)" : `${rate}×`;
  $("rate").setAttribute("aria-valuetext", `${rate} times smaller`);
  const method = status?.methods.find((one) => one.name === $("method").value);
  $("rate-note").textContent = rate === 1 ? "Nothing is evicted: a full cache."
    : `Keep ${rate === 2 ? "half" : `1/${rate}`} of the KVs: ${method?.summary ?? ""}`;
}

/** The events of an answer as they come. */
async function* ask(body, signal) {
  const response = await fetch("v1/chat/completions",
    { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (!response.ok) {
    const said = await response.json().catch(() => null);
    throw new Error(said?.error?.message ?? `the server answers ${response.status}`);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ") || block === "data: [DONE]") continue;
      const event = JSON.parse(block.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// Answers

class Answer {
  constructor(place, messages, compression, title) {
    this.messages = messages;
    this.compression = compression;
    this.full = compression.method === "full";
    this.box = make("div", `answer waiting${this.full ? " full" : ""}`);
    const head = make("div", "head");
    this.title = make("b", "", title);
    this.state = make("span", "", "reading …");
    head.append(this.title, this.state);
    this.text = make("div", "text");
    this.foot = make("div", "foot");
    this.box.append(head, this.text, this.foot);
    place.append(this.box);
    this.tokens = 0;
    this.content = "";
  }

  async run(signal) {
    this.began = performance.now();
    show(this);
    try {
      const body = {
        messages: this.messages, temperature: 0, max_tokens: ANSWER_TOKENS, stream: true,
        stream_options: { include_usage: true }, compression: this.compression, kvjax: { detail: true },
      };
      for await (const event of ask(body, signal)) this.take(event);
    } catch (error) {
      this.failed = true;
      if (signal.aborted) this.state.textContent = "stopped";
      else {
        this.state.textContent = "";
        this.text.append(make("p", "error", error.message));
        this.box.scrollIntoView({ block: "nearest" });
      }
    }
    this.ended = true;
    this.box.classList.remove("waiting");
    if (this.kvs) this.foot.prepend(this.button("Show its cache", () => show(this, true)));
    draw();
    return this.content;
  }

  take(event) {
    const now = performance.now();
    if (event.kvjax?.detail) {
      this.kept = new Kept(event.kvjax.detail);
      this.kvs = event.kvjax;
      pool.wanted = Math.max(event.kvjax.blocks_before, 0);
      if (shown === this) show(this);
    }
    if (event.usage) this.tokens = event.usage.completion_tokens;
    const part = event.choices?.[0]?.delta?.content;
    if (part && !this.first) this.first = now;
    if (part) { this.content += part; this.text.textContent = this.content; this.last = now; }
    if (event.choices?.[0]?.finish_reason) this.finish = event.choices[0].finish_reason;
    const log = $("log");
    if (log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
    if (event.usage) {
      const cached = event.usage.prompt_tokens_details?.cached_tokens ?? 0;
      this.state.textContent = `${number(event.usage.prompt_tokens)} tokens read`
        + (cached ? `, ${number(cached)} of them held from before` : "");
      const cut = this.finish === "length" ? `, cut at ${number(this.tokens)}` : "";
      this.foot.append(make("span", "", `${this.rate()} · ${this.speed()} tokens/s${cut}`));
    } else if (this.first) {
      this.state.textContent = "writing …";
    }
    if (shown === this) draw();
  }

  rate() {
    if (!this.kvs?.achieved_rate) return "";
    return this.kvs.kvs_after === this.kvs.kvs_before ? "all kept" : `${times(this.kvs.achieved_rate)} smaller`;
  }

  speed() {
    const seconds = (this.last - this.first) / 1000;
    return seconds > 0 && this.tokens > 1 ? (this.tokens / seconds).toFixed(1) : "–";
  }

  button(text, press) {
    const made = make("button", "", text);
    made.type = "button";
    made.addEventListener("click", press);
    return made;
  }
}

/** Have the right side show an answer's cache. */
function show(answer, switching = false) {
  if (shown !== answer || !memory.subject || memory.subject !== answer?.kept) {
    shown?.box.classList.remove("shown");
    shown = answer;
    shown?.box.classList.add("shown");
    memory.show(answer?.kept ?? null);
  }
  if (switching) view("cache");
  draw();
}

function draw() {
  const kvs = shown?.kvs;
  $("figures").hidden = !kvs;
  if (!kvs) {
    $("subject").textContent = shown?.ended ? "This answer ended before anything of its cache was told."
      : shown ? "The prompt is being read; nothing has been forgotten yet."
      : "No answer yet: what the cache of one holds will be shown here.";
    return;
  }
  const method = shown.full || shown.compression.rate === 1 ? "a full cache" : `${shown.compression.method} at ${shown.compression.rate}×`;
  $("subject").textContent = `The cache of the marked answer, ${method}, once its prompt was read.`;
  const before = kvs.kvs_before, after = kvs.kvs_after, each = status.block_bytes;
  figure("f-rate", times(kvs.achieved_rate), "");
  figure("f-kvs", number(after), `of ${number(before)}`);
  figure("f-first", shown.first ? `${((shown.first - shown.began) / 1000).toFixed(2)} s` : "–", "");
  figure("f-speed", shown.tokens ? shown.speed() : "–", shown.tokens ? `${number(shown.tokens)} written` : "");
  $("b-before").textContent = bytes(kvs.blocks_before * each);
  $("b-after").textContent = bytes(kvs.blocks * each);
  $("b-fill").style.width = `${Math.min(100, 100 * kvs.blocks / kvs.blocks_before)}%`;
  $("bars").setAttribute("aria-label", `${bytes(kvs.blocks * each)} instead of ${bytes(kvs.blocks_before * each)}`);
  const asked = shown.compression.rate ?? 1;
  $("short").hidden = shown.full || kvs.achieved_rate > 0.8 * asked;
  $("short").textContent = `Asked for ${times(asked)}: a cache keeps at least ${number(status.floor)} tokens’ worth of KVs, `
    + "and whole blocks, so short prompts shrink less. Try a long one.";
}

function figure(id, value, below) {
  $(id).replaceChildren(document.createTextNode(value), ...(below ? [make("small", "", below)] : []));
}

// The conversation

async function send(text) {
  $("welcome").hidden = true;
  const rate = RATES[$("rate").value];
  const method = rate === 1 || !$("method").value ? "full" : $("method").value;
  const compression = method === "full" ? { method } : { method, rate };
  const turn = make("div", "turn user");
  const words = make("div", "text", text);
  turn.append(words);
  const answers = make("div", "turn answers");
  $("log").append(turn, answers);
  words.scrollTop = words.scrollHeight; // the question comes last
  $("log").scrollTop = $("log").scrollHeight;
  turns.push({ role: "user", content: text });
  const messages = [...turns];
  running = new AbortController();
  busy(true);
  const title = method === "full" ? "full cache" : `${method}, ${rate}×`;
  const answer = new Answer(answers, messages, compression, title);
  const said = await answer.run(running.signal);
  if (answer.failed && !said) {
    // What was not answered is no part of the conversation: it can be mended and sent again.
    turns.pop();
    if (!$("prompt").value) $("prompt").value = text;
    busy(false);
    return;
  }
  turns.push({ role: "assistant", content: said });
  if (method !== "full") {
    const beside = async () => {
      again.remove();
      busy(true);
      running = new AbortController();
      await new Answer(answers, messages, { method: "full" }, "full cache").run(running.signal);
      show(answer);
      busy(false);
    };
    const again = answer.button("Ask a full cache", beside);
    if (!running.signal.aborted && $("beside").checked) await beside();
    else answer.foot.append(again);
  }
  busy(false);
}

function busy(now) {
  $("send").disabled = now || !status;
  $("stop").hidden = !now;
  $("clear").disabled = now;
}

function view(name) {
  document.body.dataset.view = name;
  for (const button of document.querySelectorAll("[data-show]")) {
    button.setAttribute("aria-pressed", String(button.dataset.show === name));
  }
}

function theme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
}

for (const example of EXAMPLES) {
  const button = make("button", "", example.title);
  button.type = "button";
  button.addEventListener("click", () => { $("prompt").value = example.text; $("prompt").focus(); $("prompt").scrollTop = 1e6; });
  $("examples").append(button);
}
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || $("send").disabled) return;
  $("prompt").value = "";
  send(text);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("ask").requestSubmit(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  turns = [];
  for (const old of document.querySelectorAll(".turn")) old.remove();
  $("welcome").hidden = false;
  pool.wanted = 0;
  show(null);
  memory.show(null);
  $("prompt").focus();
});
$("rate").addEventListener("input", settings);
$("method").addEventListener("change", settings);
$("theme").addEventListener("click", theme);
for (const button of document.querySelectorAll("[data-show]")) button.addEventListener("click", () => view(button.dataset.show));
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  $("key").value = "";
  look();
});
busy(false);
look();
setInterval(() => { if ($("key-form").hidden) look(); }, 1000);
