(() => {
  const $ = id => document.getElementById(id);
  const state = { layer: 0, gate: "read", shown: null };
  let spans = [], names = [], gates = [], layers = [], running = null;

  // Texts of the model and of whoever wrote the prompt go into the page as text alone, never as markup.
  function make(tag, className, text = "") {
    const node = document.createElement(tag);
    node.className = className;
    node.textContent = text;
    return node;
  }
  const headers = () => ({ "content-type": "application/json", ...($("key").value ? { authorization: `Bearer ${$("key").value}` } : {}) });
  const say = text => { $("said").textContent = text; };

  async function failure(answer) {
    if (answer.status === 401) $("locked").hidden = false;
    const body = await answer.json().catch(() => null);
    return new Error(body?.error?.message ?? `the server answered with status ${answer.status}`);
  }
  async function model() {
    const answer = await fetch("v1/models", { headers: headers() });
    if (!answer.ok) throw await failure(answer);
    return ($("model").textContent = (await answer.json()).data[0].id);
  }

  // --- one continuation -----------------------------------------------------------------------------------------------------------
  function clear() {
    spans = []; names = []; gates = []; layers = []; state.shown = null;
    for (const id of ["words", "shares", "legend"]) $(id).replaceChildren();
    $("token").textContent = "";
  }
  function add(name) {
    const text = name.startsWith("bytes:") ? name.slice(6) : name, span = make("span", "t");
    names.push(text);
    span.textContent = text.replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t") || "∅";
    span.dataset.i = spans.length;
    spans.push(span);
    $("words").append(span);
    colour(spans.length - 1);
  }
  function take(choice) {
    for (const name of choice.logprobs?.tokens ?? []) add(name);
    for (const piece of choice.gates ?? []) {
      if (!layers.length) { layers = piece.layers.map(layer => layer.layer); step(0); }
      const count = Math.max(...piece.layers.flatMap(layer => [layer.read, layer.write].map(gate => gate?.winners.length ?? 0)));
      for (let n = 0; n < count; n++) {
        const at = gate => gate && { winner: gate.winners[n], shares: gate.shares[n] };
        gates[piece.start + n] = piece.layers.map(layer => ({ read: at(layer.read), write: at(layer.write) }));
        colour(piece.start + n);
      }
    }
  }
  async function* events(answer) {
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
    }
  }
  async function ask() {
    running = new AbortController();
    const begun = performance.now(), prompt = $("prompt").value, seed = $("seed").value;
    const body = { model: await model(), prompt, max_tokens: +$("count").value, temperature: +$("temperature").value,
      stream: true, stream_options: { include_usage: true }, echo: true, logprobs: 0, return_gates: true, ...(seed ? { seed: +seed } : {}) };
    let answer = await fetch("v1/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal });
    if (answer.status === 400) {  // a model without gates is shown without colours
      const error = await failure(answer);
      if (!error.message.includes("no head gates")) throw error;
      answer = await fetch("v1/completions", { method: "POST", headers: headers(), body: JSON.stringify({ ...body, return_gates: false }), signal: running.signal });
    }
    if (!answer.ok) throw await failure(answer);
    for await (const event of events(answer)) {
      if (event.error) throw new Error(event.error.message);
      event.choices.forEach(take);
      const used = event.usage;
      if (used) {
        spans.slice(0, used.prompt_tokens).forEach(span => span.classList.add("prompt"));
        say(`${used.prompt_tokens} tokens read, ${used.completion_tokens} new ones in ${((performance.now() - begun) / 1000).toFixed(2)} s.`);
      }
    }
  }

  // --- what is shown ----------------------------------------------------------------------------------------------------------------
  const gate = token => gates[token]?.[state.layer]?.[state.gate];
  function colour(token) {
    const span = spans[token], found = gate(token);
    if (!span) return;
    const won = found && found.winner >= 0 ? found.winner : null;
    span.dataset.w = won ?? "";
    span.style.cssText = won === null ? "" : paint(won, above(found.shares[won], 1 / found.shares.length));
    if (found && !$("legend").childElementCount) legend(found.shares.length);
    if (state.shown === token) inspect(token);
  }
  function legend(heads) {
    for (let h = 0; h < heads; h++) {
      const chip = make("span", "chip", `head ${h}`);
      chip.style.cssText = paint(h, 0.8);
      $("legend").append(chip);
    }
  }
  function distribution(title, found) {
    const box = make("div", "dist"), rows = make("div", "rows");
    box.dataset.gate = title.toLowerCase();
    box.append(make("h3", "", `${title} gate`), rows);
    (found?.shares ?? []).forEach((share, head) => {
      const chip = make("span", "chip", head), track = make("span", "track"), bar = make("b", ""), value = make("span", "", share.toFixed(4));
      chip.style.cssText = paint(head, head === found.winner ? 1 : 0.3);
      bar.style.cssText = `width:${share * 100}%;background:var(--h${head % PALETTE})`;
      value.dataset.head = head;
      value.classList.toggle("top", head === found.winner);
      track.append(bar);
      rows.append(chip, track, value);
    });
    if (!found) rows.append(make("span", "quiet", "none"));
    return box;
  }
  function inspect(token) {
    spans[state.shown]?.classList.remove("at");
    state.shown = token;
    spans[token].classList.add("at");
    $("token").replaceChildren(`Token ${token} `, make("span", "token", plain(names[token])));
    const layer = gates[token]?.[state.layer];
    $("shares").replaceChildren(...(layer ? [distribution("Read", layer.read), distribution("Write", layer.write)] : []));
  }
  function step(by) {
    state.layer = Math.min(Math.max(0, state.layer + by), Math.max(0, layers.length - 1));
    $("layer").textContent = layers.length ? `Layer ${layers[state.layer]}` : "Layer";
    $("previous").disabled = state.layer === 0;
    $("next").disabled = state.layer >= layers.length - 1;
    spans.forEach((_, token) => colour(token));
  }

  $("words").addEventListener("pointerover", event => {
    const span = event.target.closest(".t");
    if (span) inspect(+span.dataset.i);
  });
  $("previous").onclick = () => step(-1);
  $("next").onclick = () => step(1);
  $("gate").onchange = event => { state.gate = event.target.value; step(0); };
  $("numbers").onchange = event => document.body.classList.toggle("numbers", event.target.checked);
  $("stop").onclick = () => running?.abort();
  $("ask").onsubmit = async event => {
    event.preventDefault();
    clear();
    step(0);
    say("");
    document.documentElement.dataset.state = "running";
    $("go").disabled = true; $("stop").disabled = false;
    try {
      await ask();
    } catch (error) {
      say(error.name === "AbortError" ? "Stopped." : error.message);
    }
    $("go").disabled = false; $("stop").disabled = true;
    document.documentElement.dataset.state = "done";
  };
  step(0);
  model().catch(error => say(error.message)).finally(() => { document.documentElement.dataset.ready = "yes"; });
})();
