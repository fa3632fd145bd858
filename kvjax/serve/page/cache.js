// Pictures of a cache: which KVs each head kept, what is left of a prompt, blocks over time.
// Whatever a model or a user wrote goes into the page as text, never as markup.

const $ = (id) => document.getElementById(id);
export const number = (x) => Math.round(x).toLocaleString("en");
export const times = (x) => `${x < 9.95 ? x.toFixed(1) : Math.round(x)}×`;

export function bytes(n) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let at = 0;
  while (n >= 999.5 && at < units.length - 1) { n /= 1000; at += 1; }
  return `${n < 9.95 && at ? n.toFixed(1) : Math.round(n)} ${units[at]}`;
}

/** The bits of a hexadecimal text, the first in the highest bit of the first byte. */
function bits(hex, count) {
  const found = new Uint8Array(count);
  for (let i = 0; i < count; i += 1) {
    const digit = parseInt(hex[i >> 2], 16);
    found[i] = (digit >> (3 - (i & 3))) & 1;
  }
  return found;
}

/** What the response's `kvjax.detail` says, made ready to be drawn. */
export class Kept {
  constructor(detail) {
    this.layers = detail.layers;
    this.heads = detail.kv_heads;
    this.tokens = detail.tokens;
    this.kept = detail.kept;
    this.holds = detail.heads.map((layer) => layer.map((hex) => bits(hex, detail.tokens.length)));
    this.holders = new Uint32Array(detail.tokens.length);
    for (const layer of this.holds) {
      for (const head of layer) head.forEach((bit, i) => { this.holders[i] += bit; });
    }
    this.all = this.layers * this.heads;
  }
}

function make(tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** The heat map and the tokens, which point at each other. */
export class Memory {
  constructor() {
    this.heat = $("heat");
    this.text = $("tokens");
    this.subject = null;
    this.listen();
  }

  show(kept) {
    this.subject = kept;
    this.at = null;
    this.token = null;
    $("heat-panel").hidden = $("tokens-panel").hidden = !kept;
    if (!kept) return;
    this.drawHeat(kept);
    this.drawTokens(kept);
    this.say();
  }

  drawHeat(kept) {
    const most = Math.max(1, ...kept.kept.flat());
    const least = Math.min(...kept.kept.flat());
    this.cells = [];
    const rows = [];
    for (let h = 0; h < kept.heads; h += 1) {
      const row = make("div");
      row.setAttribute("role", "row");
      for (let l = 0; l < kept.layers; l += 1) {
        const cell = make("div", "cell");
        cell.setAttribute("role", "gridcell");
        cell.setAttribute("aria-label", `layer ${l}, head ${h}: ${kept.kept[l][h]} KVs`);
        cell.tabIndex = l + h === 0 ? 0 : -1;
        cell.dataset.layer = l;
        cell.dataset.head = h;
        cell.style.setProperty("--v", (kept.kept[l][h] / most).toFixed(3));
        row.append(cell);
        this.cells.push(cell);
      }
      rows.push(row);
    }
    this.heat.replaceChildren(...rows);
    this.heat.style.gridTemplateColumns = `repeat(${kept.layers}, minmax(0, 1fr))`;
    // Small models would have squares as large as the panel.
    this.heat.parentElement.style.maxWidth = `${kept.layers * 2.4}rem`;
    this.heat.parentElement.style.minWidth = "min(100%, 14rem)";
    $("axis-first").textContent = "first layer";
    $("axis-last").textContent = "last layer";
    $("legend-low").textContent = `0`;
    $("legend-high").textContent = `${number(most)} KVs in the fullest head, ${number(least)} in the emptiest`;
  }

  drawTokens(kept) {
    const spans = kept.tokens.map((text, i) => {
      const share = kept.holders[i] / kept.all;
      const span = make("span", share ? "" : "gone", text);
      span.style.setProperty("--v", (share ** 0.7).toFixed(3));
      span.dataset.token = i;
      return span;
    });
    this.spans = spans;
    this.text.replaceChildren(...spans);
    this.text.scrollTop = 0;
    this.text.classList.remove("one");
    let gone = 0, whole = 0;
    for (const held of kept.holders) { gone += held === 0; whole += held === kept.all; }
    const part = kept.tokens.length - gone - whole;
    $("tokens-note").textContent = `The stronger its colour, the more of the ${number(kept.all)} heads still hold a token. `
      + `Of ${number(kept.tokens.length)} tokens ${number(gone)} are gone from every head, `
      + `${number(part)} live on in some, ${number(whole)} in all.`;
  }

  /** Point at a head (null for none): the tokens are those that it kept. */
  pickHead(cell) {
    if (this.at === cell || !this.subject) return;
    this.at?.classList.remove("on");
    this.at = cell;
    this.text.classList.toggle("one", Boolean(cell));
    if (cell) {
      cell.classList.add("on");
      const holds = this.subject.holds[cell.dataset.layer][cell.dataset.head];
      this.spans.forEach((span, i) => span.classList.toggle("mine", holds[i] === 1));
    }
    this.say();
  }

  /** Point at a token (null for none): the heads are those that hold it. */
  pickToken(index) {
    if (this.token === index || !this.subject) return;
    if (this.token !== null) this.spans[this.token]?.classList.remove("at");
    this.token = index;
    this.heat.classList.toggle("marking", index !== null);
    for (const cell of this.cells) {
      const holds = index !== null && this.subject.holds[cell.dataset.layer][cell.dataset.head][index] === 1;
      cell.classList.toggle("holds", holds);
    }
    if (index !== null) this.spans[index].classList.add("at");
    this.say();
  }

  say() {
    const kept = this.subject;
    if (this.at) {
      const { layer, head } = this.at.dataset;
      const held = kept.kept[layer][head];
      $("heat-says").textContent = `Layer ${layer}, head ${head} kept ${number(held)} of ${number(kept.tokens.length)} KVs.`;
    } else {
      $("heat-says").textContent = "";
    }
    if (this.token === null) { $("tokens-says").textContent = ""; return; }
    const held = kept.holders[this.token];
    const layers = [];
    kept.holds.forEach((layer, l) => { if (layer.some((head) => head[this.token])) layers.push(l); });
    const name = JSON.stringify(kept.tokens[this.token] || "part of a character");
    const where = held && held < kept.all ? `, in layers ${ranges(layers)}` : "";
    $("tokens-says").textContent = `${name}, token ${number(this.token)}: held by ${number(held)} of ${number(kept.all)} heads${where}.`;
  }

  listen() {
    const cellOf = (event) => event.target.closest?.(".cell");
    this.heat.addEventListener("pointerover", (event) => { if (cellOf(event)) this.pickHead(cellOf(event)); });
    this.heat.addEventListener("pointerleave", () => { if (!this.heat.contains(document.activeElement)) this.pickHead(null); });
    this.heat.addEventListener("click", (event) => cellOf(event)?.focus());
    this.heat.addEventListener("focusin", (event) => { if (cellOf(event)) this.pickHead(cellOf(event)); });
    this.heat.addEventListener("focusout", () => this.pickHead(null));
    this.heat.addEventListener("keydown", (event) => this.moveHead(event));
    const tokenOf = (event) => event.target.dataset?.token;
    this.text.addEventListener("pointerover", (event) => {
      if (tokenOf(event) !== undefined) this.pickToken(Number(tokenOf(event)));
    });
    this.text.addEventListener("pointerleave", () => { if (document.activeElement !== this.text) this.pickToken(null); });
    this.text.addEventListener("click", (event) => {
      if (tokenOf(event) !== undefined) this.pickToken(Number(tokenOf(event)));
    });
    this.text.addEventListener("blur", () => this.pickToken(null));
    this.text.addEventListener("keydown", (event) => this.moveToken(event));
  }

  moveHead(event) {
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const step = steps[event.key], cell = event.target.closest?.(".cell");
    if (event.key === "Escape") cell?.blur();
    if (!step || !cell) return;
    event.preventDefault();
    const { layers, heads } = this.subject;
    const layer = Math.min(layers - 1, Math.max(0, Number(cell.dataset.layer) + step[0]));
    const head = Math.min(heads - 1, Math.max(0, Number(cell.dataset.head) + step[1]));
    const next = this.cells[head * layers + layer];
    cell.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  moveToken(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10 };
    if (!(event.key in steps) || !this.subject) return;
    event.preventDefault();
    const from = this.token ?? -steps[event.key];
    const next = Math.min(this.spans.length - 1, Math.max(0, from + steps[event.key]));
    this.pickToken(next);
    this.spans[next].scrollIntoView({ block: "nearest" });
  }
}

/** 0, 1, 2, 5 as "0–2, 5"; at most a few parts. */
function ranges(values) {
  const parts = [];
  for (let i = 0; i < values.length;) {
    let j = i;
    while (values[j + 1] === values[j] + 1) j += 1;
    parts.push(j > i ? `${values[i]}–${values[j]}` : `${values[i]}`);
    i = j + 1;
  }
  return parts.length > 8 ? `${parts.slice(0, 8).join(", ")} …` : parts.join(", ");
}

const SPAN = 120; // seconds that the picture of the pool holds

/** Blocks used over time. */
export class Pool {
  constructor() {
    this.seen = [];
    this.wanted = 0;
  }

  add(status) {
    const now = performance.now() / 1000;
    this.seen.push([now, status.blocks_used]);
    while (this.seen.length > 2 && this.seen[1][0] < now - SPAN) this.seen.shift();
    this.draw(status, now);
  }

  draw(status, now) {
    const most = Math.max(1, this.wanted, ...this.seen.map(([, used]) => used)) * 1.15;
    const x = (t) => Math.max(0, 600 * (1 - (now - t) / SPAN)).toFixed(1);
    const y = (blocks) => (138 - 134 * (blocks / most)).toFixed(1);
    const points = [];
    this.seen.forEach(([t, used], i) => {
      if (i) points.push(`H${x(t)}`);
      points.push(`${i ? "V" : `M${x(t)},`}${y(used)}`);
    });
    const line = points.join("");
    const svg = $("pool");
    svg.querySelector(".line").setAttribute("d", line);
    svg.querySelector(".area").setAttribute("d", `${line}V140H${x(this.seen[0][0])}Z`);
    svg.querySelector(".whole").setAttribute("d", this.wanted ? `M0,${y(this.wanted)}H600` : "");
    $("pool-key").hidden = !this.wanted;
    const size = bytes(status.blocks_used * status.block_bytes);
    const queue = status.waiting ? `, ${status.waiting} wait` : "";
    $("pool-says").textContent = `${number(status.blocks_used)} used (${size}), ${number(status.blocks_free)} free; `
      + `${status.running} running${queue}. A block is ${status.block_size} KVs of one head.`;
  }
}
