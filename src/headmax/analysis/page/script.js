"use strict";
(async () => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const TOKENS = DATA.tokens, COUNT = TOKENS.length, CHUNK = 200, BINS = 256;
  const LAYERS = [...new Set(DATA.models.flatMap(model => model.layers.map(layer => layer.index)))].sort((a, b) => a - b);
  const state = { layer: LAYERS[0], gate: "read", colour: "winner", token: 0, window: COUNT > 64 ? 64 : 0, hover: null };
  const $ = id => document.getElementById(id);

  // --- data ---------------------------------------------------------------------------------------------------------------------
  async function inflate(text) {
    const raw = atob(text), packed = new Uint8Array(raw.length);
    for (let n = 0; n < raw.length; n++) packed[n] = raw.charCodeAt(n);
    return new Uint8Array(await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer());
  }
  class Gate {
    static async of(raw) {
      if (!raw) return null;
      const [shares, winners] = await Promise.all([inflate(raw.shares), inflate(raw.winners)]), gate = new Gate();
      const half = shares.length / 2, units = new Uint16Array(half);
      for (let n = 0; n < half; n++) units[n] = 256 * shares[n] + shares[half + n];  // high bytes first, then low ones
      return Object.assign(gate, { units, winners, heads: raw.heads, meanEntropy: raw.entropy, load: raw.load, wins: raw.wins, dead: new Set(raw.dead) });
    }
    share(token, head) { return this.units[token * this.heads + head] / DATA.unit; }
    winner(token) { return this.winners[token] === DATA.tie ? null : this.winners[token]; }
    entropy(token) {
      let sum = 0, bits = 0;
      for (let h = 0; h < this.heads; h++) sum += this.share(token, h);
      for (let h = 0; h < this.heads; h++) {
        const p = this.share(token, h) / sum;
        if (p > 0) bits -= p * Math.log2(p);
      }
      return Math.max(0, bits);
    }
    /** Mean shares [bins, heads] of the tokens from..to. C is bilinear, so C of means is the mean of C. */
    means(from, to, bins) {
      const out = new Float32Array(bins * this.heads);
      for (let b = 0; b < bins; b++) {
        const [start, end] = edges(from, to, bins, b);
        for (let t = start; t < end; t++) for (let h = 0; h < this.heads; h++) out[b * this.heads + h] += this.share(t, h) / (end - start);
      }
      return out;
    }
  }
  const edges = (from, to, bins, bin) => {
    const start = from + Math.floor(((to - from) * bin) / bins);
    return [start, Math.max(start + 1, from + Math.floor(((to - from) * (bin + 1)) / bins))];
  };
  function agreement(layer, query, key) {
    let sum = 0;
    for (let h = 0; h < layer.read.heads; h++) sum += layer.read.share(query, h) * layer.write.share(key, h);
    return sum;
  }
  const fixed = value => value.toFixed(4);
  const range = n => [...Array(n).keys()];

  // --- drawing ------------------------------------------------------------------------------------------------------------------
  const escaped = text => text.replace(/[&<>"]/g, c => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
  /** A token as a span; spaces before a word come before it, so that a line can end there, and line breaks at its end after it. */
  function visible(text, token) {
    const [, spaces, body, breaks] = text.match(/^((?: +(?=[^ \n]))?)([^]*?)(\n*)$/), shown = escaped(body).replace(/\n/g, "<i>↵</i>\n").replace(/\t/g, "<i>⇥</i>\t");
    return `${spaces}<span class="t" data-i="${token}">${shown + "<i>↵</i>".repeat(breaks.length) || "<i>∅</i>"}</span>${breaks}`;
  }
  function make(tag, properties = {}, ...children) {
    const node = Object.assign(document.createElement(tag), properties);
    for (const [name, value] of Object.entries(properties)) if (name.includes("-") || name === "role") node.setAttribute(name, value);
    node.append(...children);
    return node;
  }
  const rgb = name => {
    const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim().slice(1);
    return [0, 2, 4].map(n => parseInt(hex.slice(n, n + 2), 16));
  };
  const mix = (a, b, part) => a.map((x, n) => Math.round(x + (b[n] - x) * part));
  function fit(canvas, width, height) { if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height }); return canvas.getContext("2d"); }

  function distribution(gate, token, title) {
    if (!gate) return `<div class="dist"><h3>${title}</h3><p class="quiet">This model has no ${title.toLowerCase()} gate.</p></div>`;
    const won = gate.winner(token), bits = gate.entropy(token);
    const rows = range(gate.heads).map(h => {
      const share = gate.share(token, h);
      return `<span class="chip${h === won ? " top" : ""}" style="${paint(h, h === won ? 1 : 0.3)}">${gate.heads > PALETTE ? "" : "head "}${h}</span><span class="track"><b style="width:${share * 100}%;background:var(--h${h % PALETTE})"></b>` +
        `<u style="left:${100 / gate.heads}%"></u></span><span class="${h === won ? "top" : ""}" data-head="${h}">${fixed(share)}</span>`;
    });
    return `<div class="dist" data-gate="${title.toLowerCase()}"><h3>${title}<span>${won === null ? "tie" : `head ${won} wins`}, ${bits.toFixed(3)} bits</span></h3><div class="rows${gate.heads > PALETTE ? " many" : ""}">${rows.join("")}</div></div>`;
  }

  // --- one model ----------------------------------------------------------------------------------------------------------------
  class Pane {
    static async of(model, alone) {
      const layers = await Promise.all(model.layers.map(async raw => ({ index: raw.index, mixer: raw.mixer, read: await Gate.of(raw.read), write: await Gate.of(raw.write) })));
      return new Pane(model.name, new Map(layers.map(layer => [layer.index, layer])), alone);
    }
    constructor(name, layers, alone) {
      this.layers = layers;
      this.words = make("div", { className: "words", tabIndex: 0, role: "group", "aria-label": `Text of ${TOKENS.length} tokens; left and right arrows move between tokens, up and down between layers` });
      this.heading = make("h2");
      this.legend = make("div", { className: "legend", "aria-label": "Colours of the heads" });
      this.token = make("section", { className: "card inspector", "aria-label": "Selected token" });
      this.load = make("section", { className: "card load", "aria-label": "Load of the heads" });
      this.field = make("canvas", { tabIndex: 0, role: "img" });
      this.mark = make("i");
      this.scale = make("div", { className: "scale" });
      this.readout = make("p", { className: "readout", "aria-live": "polite" });
      this.axis = make("p", { className: "axis quiet" });
      this.strips = make("div", { className: "strips" });
      const size = make("select", { className: "window", "aria-label": "Tokens in the map" });
      for (const n of [0, 32, 64, 128, 256, 512]) if (n < COUNT) size.append(make("option", { value: n, textContent: n ? `${n} tokens around it` : "whole text" }));
      size.onchange = () => update({ window: +size.value });
      this.size = size;
      const heading = (title, side) => make("header", {}, make("h2", { textContent: title }), side);
      this.root = make("section", { className: "pane", "aria-label": name },
        ...(alone ? [] : [make("h2", { className: "name", textContent: name })]),
        make("div", { className: "column" }, make("section", { className: "card text" }, make("header", {}, this.heading, this.legend), this.words),
          make("section", { className: "card layers" }, heading("Entropy over layers and positions",
            make("span", { className: "quiet", textContent: "strong: one head takes all · pale: all share" })), this.strips), this.load),
        make("div", { className: "column" }, this.token, make("section", { className: "card map" }, heading("What a query can reach", size),
          make("div", { className: "body" }, make("p", { className: "quiet", innerHTML:
            "C<sub>ij</sub> = Σ<sub>h</sub> read<sub>h</sub>(i) · write<sub>h</sub>(j): rows read, columns wrote. 1: both chose the same head; 1 / heads: no choice." }),
            make("div", { className: "square" }, this.field, this.mark), this.axis, this.scale, this.readout))));
      this.fill();
      this.rows();
      this.listen();
    }
    get layer() { return this.layers.get(state.layer); }
    get gate() { return this.layer && this.layer[state.gate]; }

    fill() {
      this.spans = [];
      for (let from = 0, to; from < COUNT; from = to) {
        const html = [];
        for (to = Math.min(COUNT, from + CHUNK); to < COUNT && to < from + 2 * CHUNK && !TOKENS[to - 1].endsWith("\n");) to++;  // a chunk starts a line
        for (let t = from; t < to; t++) html.push(visible(TOKENS[t], t));
        const chunk = make("div", { className: "chunk", innerHTML: html.join("").replace(/^ (?=<)/, "") });
        chunk.dataset.from = from;
        this.words.append(chunk);
        this.spans.push(...chunk.children);
      }
      this.seen = new Set();
      this.watch = new IntersectionObserver(entries => {
        for (const entry of entries) {
          if (!entry.isIntersecting) { this.seen.delete(entry.target); continue; }
          this.seen.add(entry.target);
          if (entry.target.drawn !== this.version) this.colour(entry.target);
        }
      }, { root: this.words, rootMargin: "300px" });
      for (const chunk of this.words.children) this.watch.observe(chunk);
    }
    colour(chunk) {
      const gate = this.gate, reach = state.colour === "reach" && this.layer && this.layer.read && this.layer.write;
      for (const span of chunk.children) {
        const token = +span.dataset.i, won = gate ? gate.winner(token) : null, even = gate ? 1 / gate.heads : 1;
        span.dataset.w = won === null ? "" : won;
        const later = state.colour === "reach" && token > state.token;
        span.classList.toggle("out", later);
        if (reach && !later) {
          span.style.cssText = `background:color-mix(in srgb,var(--above) calc(var(--most) * ${(agreement(this.layer, state.token, token) / this.farthest).toFixed(3)} * 1%),transparent)`;
        } else span.style.cssText = won === null || state.colour === "reach" ? "" : paint(won, above(gate.share(token, won), even));
      }
      chunk.drawn = this.version;
    }
    recolour() {
      if (state.colour === "reach" && this.layer && this.layer.read && this.layer.write) {
        this.farthest = Math.max(1e-9, ...range(state.token + 1).map(key => agreement(this.layer, state.token, key)));
      }
      this.version = (this.version || 0) + 1;
      for (const chunk of this.seen) this.colour(chunk);
    }
    select(scroll) {
      if (this.at) this.at.classList.remove("at");
      this.at = this.spans[state.token];
      this.at.classList.add("at");
      if (!scroll) return;
      const box = this.words.getBoundingClientRect(), span = this.at.getBoundingClientRect();
      if (span.top < box.top + 8 || span.bottom > box.bottom - 8) this.words.scrollTop += span.top - box.top - box.height / 3;
    }
    inspect() {
      const token = state.hover ?? state.token, layer = this.layer;
      this.token.innerHTML = `<header><h2>Token ${token}</h2><span class="token">${escaped(plain(TOKENS[token]))}</span></header>` +
        (layer ? `<div class="gates">${distribution(layer.read, token, "Read")}${distribution(layer.write, token, "Write")}</div>` : this.missing());
    }
    missing() { return `<p class="quiet">Layer ${state.layer} of this model has no gates.</p>`; }
    loads() {
      const part = (gate, title) => gate ? `<div class="dist"><h3>${title}<span>${gate.meanEntropy.toFixed(3)} bits on average</span></h3><div class="rows">` +
        `<span class="head">head</span><span class="head">mean share</span><span class="head"></span><span class="head">tokens won</span>` +
        range(gate.heads).map(h => `<span class="chip" style="${paint(h, 0.5)}">${h}</span><span class="track"><b style="width:${gate.load[h] * 100}%;background:var(--h${h % PALETTE})"></b><u style="left:${100 / gate.heads}%"></u></span>` +
          `<span>${fixed(gate.load[h])}</span><span>${gate.dead.has(h) ? '<span class="flag" title="less than a tenth of an even share">dead</span> ' : ""}${(gate.wins[h] * 100).toFixed(1)} %</span>`).join("") + "</div></div>" : "";
      this.load.innerHTML = "<header><h2>Load of the heads</h2><span class=quiet>line: an even share</span></header>" +
        (this.layer ? `<div class="gates">${part(this.layer.read, "Read")}${part(this.layer.write, "Write")}</div>` : this.missing());
    }
    legends() {
      const reach = state.colour === "reach";
      this.heading.textContent = reach ? `What token ${state.token} can reach` : "Who wins each token";
      this.legend.innerHTML = reach ? (this.layer && this.layer.read && this.layer.write ? `<span class="quiet">full colour: C = ${fixed(this.farthest)}</span>` : "")
        : this.gate ? range(this.gate.heads).map(h => `<span class="chip" style="${paint(h, 0.8)}">head ${h}</span>`).join("") : "";
    }

    // the map of agreement
    extent() {
      const size = state.window && state.window < COUNT ? state.window : COUNT;
      const from = Math.max(0, Math.min(COUNT - size, state.token - Math.floor(size / 2)));
      return { from, to: from + size, bins: Math.min(size, BINS) };
    }
    measure() {
      const layer = this.layer;
      this.values = null;
      if (!layer || !layer.read || !layer.write || layer.read.heads !== layer.write.heads) return null;
      const { from, to, bins } = this.extent(), heads = layer.read.heads;
      const read = layer.read.means(from, to, bins), write = layer.write.means(from, to, bins), values = new Float32Array(bins * bins);
      let low = Infinity, high = 0;
      for (let i = 0; i < bins; i++) for (let j = 0; j <= i; j++) {
        let sum = 0;
        for (let h = 0; h < heads; h++) sum += read[i * heads + h] * write[j * heads + h];
        values[i * bins + j] = sum;
        if (sum < low) low = sum;
        if (sum > high) high = sum;
      }
      this.values = values;
      return { low, high, even: 1 / heads };
    }
    /** Blue above an even split, orange below; differences that are small beside it stay pale, however few larger ones there are. */
    shade(value, limits) {
      const { low, high, even } = limits, more = value >= even;
      const part = more ? (value - even) / Math.max(high - even, 0.2 * (1 - even), 1e-9) : (even - value) / Math.max(even - low, 0.5 * even);
      return mix(this.tones.none, more ? this.tones.above : this.tones.below, Math.min(1, part));
    }
    drawMap(limits) {
      const { from, to, bins } = this.extent(), context = fit(this.field, bins, bins), image = context.createImageData(bins, bins);
      this.limits = limits;
      this.tones = { none: rgb("--well"), above: rgb("--above"), below: rgb("--below") };
      this.field.closest(".body").hidden = !this.values;
      if (!this.values) return;
      for (let i = 0; i < bins; i++) for (let j = 0; j <= i; j++) {
        const at = 4 * (i * bins + j), tone = this.shade(this.values[i * bins + j], limits);
        for (let c = 0; c < 3; c++) image.data[at + c] = tone[c];
        image.data[at + 3] = 255;
      }
      context.putImageData(image, 0, 0);
      this.field.setAttribute("aria-label", `Agreement between tokens ${from} to ${to - 1}; arrow keys move, Enter selects the reading token`);
      const each = (to - from) / bins;
      this.axis.innerHTML = `<span>token ${from}</span><span>${each > 1 ? `each cell the mean over ${each.toFixed(1)} × ${each.toFixed(1)} tokens` : "each cell one pair"}</span><span>token ${to - 1}</span>`;
      const strip = make("canvas"), brush = fit(strip, 128, 1);
      for (let n = 0; n < 128; n++) {
        brush.fillStyle = `rgb(${this.shade(limits.low + ((limits.high - limits.low) * n) / 127, limits)})`;
        brush.fillRect(n, 0, 1, 1);
      }
      this.scale.replaceChildren(make("span", { textContent: fixed(limits.low) }), strip, make("span", { textContent: fixed(limits.high) }));
      this.point(this.cursor ?? [state.token, 0]);
    }
    point([query, key]) {
      if (!this.values) return;
      const { from, to, bins } = this.extent();
      query = Math.max(from, Math.min(to - 1, query));
      key = Math.max(from, Math.min(query, key));
      this.cursor = [query, key];
      const [row, column] = [query, key].map(t => Math.floor(((t - from) * bins) / (to - from)));
      this.mark.style.cssText = `inset:${(100 * row) / bins}% auto auto ${(100 * column) / bins}%;width:${Math.max(1, 100 / bins)}%;height:${Math.max(1, 100 / bins)}%`;
      const quoted = t => `${t} <span class="token">${escaped(plain(TOKENS[t]))}</span>`;
      this.readout.innerHTML = `${quoted(query)} reads, ${quoted(key)} wrote: C = <b>${fixed(agreement(this.layer, query, key))}</b> <span class="quiet">(no choice: ${fixed(this.limits.even)})</span>`;
    }

    // entropy of all layers
    rows() {
      const head = text => make("span", { className: "head", textContent: text });
      this.strips.append(head("layer"), head("read gate, from the first token to the last"), head("bits"), head("write gate"), head("bits"));
      this.buttons = new Map();
      this.strips.style.setProperty("--row", `${Math.max(15, Math.min(42, 400 / this.layers.size))}px`);
      this.canvases = [];
      for (const [index, layer] of this.layers) {
        const dead = ["read", "write"].reduce((sum, name) => sum + (layer[name] ? layer[name].dead.size : 0), 0);
        const button = make("button", { type: "button", textContent: `${index} ${layer.mixer}${dead ? ` · ${dead} dead` : ""}`, "aria-label": `Layer ${index}` });
        button.onclick = () => update({ layer: index });
        this.buttons.set(index, button);
        this.strips.append(button);
        for (const name of ["read", "write"]) {
          const gate = layer[name], canvas = make("canvas", { role: "img", "aria-label": `Entropy of layer ${index}'s ${name} gate over the text` });
          canvas.onclick = event => update({ layer: index, gate: name, token: Math.min(COUNT - 1, Math.floor((event.offsetX / canvas.clientWidth) * COUNT)) }, true);
          this.strips.append(canvas, make("span", { textContent: gate ? gate.meanEntropy.toFixed(2) : "–" }));
          if (gate) this.canvases.push([canvas, gate]);
        }
      }
    }
    /** Draws the strips a few at a time, so that the page answers meanwhile. */
    drawStrips(first = 0) {
      const none = rgb("--well"), full = rgb("--strong"), begin = performance.now();
      for (let n = first; n < this.canvases.length; n++) {
        const [canvas, gate] = this.canvases[n], bins = Math.min(COUNT, BINS), context = fit(canvas, bins, 1);
        for (let b = 0; b < bins; b++) {
          const [start, end] = edges(0, COUNT, bins, b);
          let sum = 0;
          for (let t = start; t < end; t++) sum += gate.entropy(t);
          context.fillStyle = `rgb(${mix(none, full, 1 - sum / (end - start) / Math.max(1e-9, Math.log2(gate.heads)))})`;
          context.fillRect(b, 0, 1, 1);
        }
        if (performance.now() - begin > 12) return void setTimeout(() => this.drawStrips(n + 1));
      }
      this.complete = true;
    }
    press() { for (const [index, button] of this.buttons) button.setAttribute("aria-pressed", index === state.layer); }

    listen() {
      const tokenOf = event => event.target.closest(".t");
      this.words.addEventListener("mouseover", event => { const span = tokenOf(event); if (span) hover(+span.dataset.i, this, span); });
      this.words.addEventListener("mouseleave", () => hover(null));
      this.words.addEventListener("click", event => { const span = tokenOf(event); if (span) update({ token: +span.dataset.i }); });
      this.words.addEventListener("keydown", event => {
        const move = { ArrowLeft: -1, ArrowRight: 1, Home: -COUNT, End: COUNT }[event.key], step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
        if (event.ctrlKey || event.metaKey || event.altKey || (move === undefined && step === undefined)) return;
        event.preventDefault();
        if (move) update({ token: state.token + move }, true);
        else stepLayer(step);
        hover(null);
        showTip(this, this.spans[state.token], state.token);
        say();
      });
      this.words.addEventListener("blur", hideTip);
      this.words.addEventListener("scroll", hideTip);
      const cell = event => {
        const { from, to } = this.extent(), scale = (to - from) / this.field.clientWidth;
        return [from + Math.floor(event.offsetY * scale), from + Math.floor(event.offsetX * scale)];
      };
      this.field.addEventListener("mousemove", event => this.point(cell(event)));
      this.field.addEventListener("click", event => update({ token: cell(event)[0] }, true));
      this.field.addEventListener("keydown", event => {
        const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
        if (move) { event.preventDefault(); this.point([this.cursor[0] + move[0], this.cursor[1] + move[1]]); }
        if (event.key === "Enter") update({ token: this.cursor[0] }, true);
      });
    }
  }

  // --- all of it ----------------------------------------------------------------------------------------------------------------
  const panes = await Promise.all(DATA.models.map(model => Pane.of(model, DATA.models.length === 1)));
  const tip = $("tip");
  function showTip(pane, span, token) {
    const gate = pane.gate;
    if (!gate) return;
    tip.innerHTML = `<p class="quiet">token ${token} <span class="token">${escaped(plain(TOKENS[token]))}</span></p>` + distribution(gate, token, state.gate === "read" ? "Read" : "Write");
    tip.hidden = false;
    const at = span.getClientRects()[0] ?? span.getBoundingClientRect(), box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(innerWidth - box.width - 8, at.left))}px`;
    tip.style.top = `${at.bottom + 8 + box.height < innerHeight ? at.bottom + 8 : Math.max(8, at.top - box.height - 8)}px`;
  }
  function hideTip() { tip.hidden = true; }
  function hover(token, pane, span) {
    if (state.hover === token) return;
    state.hover = token;
    for (const each of panes) each.inspect();
    if (token === null) hideTip();
    else showTip(pane, span, token);
  }
  function say() {
    const words = ["read", "write"].map(name => {
      const gate = panes[0].layer && panes[0].layer[name], won = gate && gate.winner(state.token);
      return gate ? `${name} ${won === null ? "tie" : `head ${won}, ${fixed(gate.share(state.token, won))}`}` : "";
    });
    $("said").textContent = `Layer ${state.layer}, token ${state.token}, ${plain(TOKENS[state.token])}: ${words.join("; ")}`;
  }
  function stepLayer(by) {
    const at = LAYERS.indexOf(state.layer) + by;
    if (at >= 0 && at < LAYERS.length) update({ layer: LAYERS[at] });
  }
  function update(change, scroll = false) {
    if ("token" in change) change.token = Math.max(0, Math.min(COUNT - 1, change.token));
    Object.assign(state, change);
    const at = LAYERS.indexOf(state.layer), difference = (DATA.differences ?? []).find(d => d.layer === state.layer);
    $("layer").textContent = `Layer ${state.layer} of ${LAYERS[0]}–${LAYERS[LAYERS.length - 1]}`;
    $("previous").disabled = at === 0;
    $("next").disabled = at === LAYERS.length - 1;
    for (const name of ["gate", "colour"]) document.querySelector(`input[name=${name}][value=${state[name]}]`).checked = true;
    if (difference && difference.agreement !== null) {
      $("apart").textContent = difference.agreement.toFixed(4);
    }
    const maps = "token" in change && !state.window && Object.keys(change).length === 1 ? null : panes.map(pane => pane.measure());
    const known = maps && maps.filter(Boolean);
    for (const pane of panes) {
      pane.select(scroll);
      pane.inspect();
      if (!("token" in change) || Object.keys(change).length > 1 || state.colour === "reach") { pane.recolour(); pane.legends(); }
      if ("layer" in change) { pane.loads(); pane.press(); }
      if (pane.size.value !== String(state.window)) pane.size.value = state.window;
      pane.cursor = [state.token, pane.cursor ? Math.min(pane.cursor[1], state.token) : 0];
      if (maps) {  // two models share one scale
        const limits = known.length && { low: Math.min(...known.map(m => m.low)), high: Math.max(...known.map(m => m.high)) };
        const own = maps[panes.indexOf(pane)];
        pane.drawMap(own ? { ...limits, even: own.even } : null);
      } else pane.point(pane.cursor);
    }
  }
  function glance() {
    const model = DATA.models[0], names = DATA.models.map(each => each.name);
    $("title").textContent = names.join(" vs ");
    document.title = `${names.join(" vs ")} · head gates`;
    const heads = model.layers[0][model.layers[0].read ? "read" : "write"].heads;
    $("subtitle").textContent = DATA.models.length === 1
      ? `${model.layers.length} layers of ${heads} heads with ${model.kind} gates; the read gate acts ${model.readPosition === "query" ? "on the query" : "after the norm"}.`
      : "The same text through two checkpoints. Selections move together; heads are numbered independently in each.";
    const bar = " <small>|</small> ";
    const entropy = name => DATA.models.map(each => {
      const gates = each.layers.map(layer => layer[name]).filter(Boolean);
      return gates.length ? (gates.reduce((sum, gate) => sum + gate.entropy, 0) / gates.length).toFixed(2) : "–";
    }).join(bar);
    const dead = DATA.models.map(each => each.layers.reduce((sum, layer) => sum + ["read", "write"].reduce((n, name) => n + (layer[name] ? layer[name].dead.length : 0), 0), 0));
    const most = Math.log2(heads).toFixed(2), entry = (title, value, id = "") => `<div><dt>${title}</dt><dd${id}>${value}</dd></div>`;
    $("glance").innerHTML = entry("tokens", COUNT.toLocaleString("en")) + entry(`read entropy, of ${most} bits`, entropy("read")) +
      entry(`write entropy, of ${most} bits`, entropy("write")) + entry("dead heads", dead.join(bar), dead.some(Boolean) ? ' class="alarm"' : "") +
      (DATA.differences ? entry("C apart in this layer (rms)", "–", ' id="apart"') : "");
  }

  const main = $("panes");
  main.classList.toggle("two", panes.length === 2);
  main.classList.toggle("short", COUNT <= 120);
  main.append(...panes.map(pane => pane.root));
  glance();
  $("previous").onclick = () => stepLayer(-1);
  $("next").onclick = () => stepLayer(1);
  for (const name of ["gate", "colour"]) $(name).addEventListener("change", event => update({ [name]: event.target.value }));
  $("numbers").onchange = event => document.body.classList.toggle("numbers", event.target.checked);
  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select")) return;
    const act = { j: () => stepLayer(1), k: () => stepLayer(-1), r: () => update({ gate: "read" }), w: () => update({ gate: "write" }),
      c: () => update({ colour: state.colour === "winner" ? "reach" : "winner" }), n: () => $("numbers").click() }[event.key];
    if (act) act();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { update({ layer: state.layer }); for (const pane of panes) pane.drawStrips(); });
  update({ layer: state.layer, token: COUNT > 1 ? Math.min(COUNT - 1, 40) : 0 });
  for (const pane of panes) setTimeout(() => pane.drawStrips());
  document.documentElement.dataset.ready = Math.round(performance.now());
})();
