// Two models' answers to one message side by side: where they part, and how far apart the predictions are at each token.

const TOP = 20;  // tokens of a prediction that the server tells
const SIDES = ["a", "b"];
const key = () => $("key").value.trim();

async function post(path, body, signal) {
  const head = { "Content-Type": "application/json", ...(key() ? { Authorization: "Bearer " + key() } : {}) };
  const response = await fetch(path, { method: body ? "POST" : "GET", headers: head, body: body && JSON.stringify(body), signal });
  if (response.ok) return response;
  if (response.status === 401) $("key-field").hidden = false;
  let message = response.status + " " + response.statusText;
  try { message = (await response.json()).error.message; } catch { /* no JSON */ }
  throw new Error(message);
}

// The token ids of the message, as model A's chat template writes it.
async function promptTokens(model, text, signal) {
  let content = text;
  if (!$("raw").checked) content = (await (await post("/apply-template", { model, messages: [{ role: "user", content: text }] }, signal)).json()).prompt;
  return (await (await post("/tokenize", { model, content, add_special: $("raw").checked, parse_special: true }, signal)).json()).tokens;
}

// Lets a model continue the tokens with the most probable ones, and shows them as they come. Returns their ids.
async function answer(side, model, prompt, signal) {
  const node = $("answer-" + side), ids = [];
  node.textContent = "";
  node.setAttribute("aria-busy", "true");
  const request = { model, prompt, n_predict: Number($("limit").value) || 128, temperature: 0, return_tokens: true, stream: true };
  for await (const event of events(await post("/completion", request, signal))) {
    if (event.error) throw new Error(event.error.message);
    ids.push(...event.tokens);
    node.textContent += event.content;
    if (event.stop) $("note-" + side).textContent = `${event.tokens_predicted} tokens, ${event.timings.predicted_per_second.toFixed(1)} per second`
      + (event.stop_type === "limit" ? ", cut off at the limit" : "");
  }
  node.removeAttribute("aria-busy");
  return ids;
}

// What a model predicts for each token of an answer: [{text, logprob, top: {text: logprob}}].
async function predictions(model, prompt, ids, signal) {
  const request = { model, prompt: [...prompt, ...ids], max_tokens: 0, temperature: 0, echo: true, logprobs: TOP };
  const { tokens, token_logprobs, top_logprobs } = (await (await post("/v1/completions", request, signal)).json()).choices[0].logprobs;
  return ids.map((_, i) => i + prompt.length).map((i) => ({ text: tokens[i], logprob: token_logprobs[i] ?? 0, top: top_logprobs[i] ?? {} }));
}

// A lower bound of the KL divergence of b's prediction from a's, in nats, from the tokens that each of them tells: tokens that both
// tell count as they are. Those that only a tells are one event, to which b gives what makes the sum least, but for each token no more
// than for the last that it tells; all others are one more event.
function divergence(a, b) {
  let sum = 0, restA = 1, restB = 1, own = 0, n = 0;
  for (const [text, logA] of Object.entries(a)) {
    const p = Math.exp(logA);
    if (text in b) {
      sum += p * (logA - b[text]);
      restA -= p;
      restB -= Math.exp(b[text]);
    } else {
      own += p;
      n += 1;
    }
  }
  restB = Math.max(restB, 0);
  const last = Math.exp(Object.values(b).sort((x, y) => y - x)[TOP - 1] ?? -Infinity), others = Math.max(restA - own, 0);
  const given = n ? Math.min(restB * own / (own + others), n * last) : 0;
  const part = (p, q) => (p > 1e-7 ? p * Math.log(p / Math.max(q, 1e-30)) : 0);
  return Math.max(sum + part(own, given) + part(others, restB - given), 0);
}

const level = (kl) => [0.01, 0.05, 0.2, 1].filter((limit) => kl >= limit).length;

// An answer token by token. first: number of the first token that is another one than in the other answer.
function comparedView(tokens, first, names) {
  const view = make("div", "tokens");
  view.setAttribute("role", "group");
  view.setAttribute("aria-label", "Tokens with the divergence of the two models; arrow keys go from one to the next");
  tokens.forEach((token, i) => {
    const span = make("span", `kl-${level(token.kl)}${i === first ? " parts" : ""}`, token.text);
    span.tabIndex = i ? -1 : 0;
    span.token = token;
    span.setAttribute("role", "img");
    span.setAttribute("aria-label", `${visible(token.text)}, KL divergence ${token.kl.toFixed(3)}${i === first ? ", here the answers part" : ""}`);
    view.append(span);
  });
  connectTokens(view, (span) => showBoth(span, names));
  return view;
}

function showBoth(span, names) {
  const { text, kl, a, b } = span.token, at = (side, one) => (one in side.top ? percent(side.top[one]) : one === text ? percent(side.logprob) : "less");
  const order = [...new Set([...Object.keys(a.top), ...Object.keys(b.top), text])];
  const best = (one) => Math.max(a.top[one] ?? -99, b.top[one] ?? -99);
  order.sort((x, y) => best(y) - best(x));
  const shown = order.slice(0, 6);
  if (!shown.includes(text)) shown.push(text);
  const rows = shown.map((one) => {
    const row = make("div", one === text ? "taken" : "");
    row.append(make("span", "", visible(one)), make("span", "", at(a, one)), make("span", "", at(b, one)));
    return row;
  });
  const head = make("div", "head");
  head.append(make("span", "", ""), ...names.map((name) => make("span", "", name)));
  placeTip(span, [make("p", "", `KL divergence ${kl.toFixed(3)}`), head, ...rows]);
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / (values.length || 1);

async function compare() {
  const models = SIDES.map((side) => $(side).value), running = state.running = new AbortController(), { signal } = running;
  busy(true);
  $("verdict").textContent = "Both models answer.";
  $("legend").hidden = true;
  $("error").hidden = true;
  $("answers").hidden = false;
  SIDES.forEach((side, i) => { $("name-" + side).textContent = models[i]; $("answer-" + side).textContent = ""; $("note-" + side).textContent = ""; });
  try {
    const prompt = await promptTokens(models[0], $("text").value, signal);
    const answers = await Promise.all(SIDES.map((side, i) => answer(side, models[i], prompt, signal)));
    const differs = answers[0].findIndex((id, i) => id !== answers[1][i]);
    const first = differs >= 0 ? differs : answers[0].length < answers[1].length ? answers[0].length : -1;
    $("verdict").textContent = "Each model reads both answers.";
    const spread = [];
    for (const [i, side] of SIDES.entries()) {
      const [a, b] = await Promise.all(models.map((model) => predictions(model, prompt, answers[i], signal)));
      const tokens = a.map((token, n) => ({ text: token.text, a: token, b: b[n], kl: divergence(token.top, b[n].top) }));
      $("answer-" + side).replaceChildren(comparedView(tokens, first, ["A", "B"]));
      spread.push(tokens);
    }
    $("legend").hidden = false;
    $("verdict").textContent = verdict(spread, first);
  } catch (error) {
    $("verdict").textContent = "";
    if (!signal.aborted) {
      $("error").textContent = error.message;
      $("error").hidden = false;
    }
  }
  state.running = null;
  busy(false);
}

function verdict([ofA, ofB], first) {
  const over = (tokens) => (tokens.length ? mean(tokens.map((token) => token.kl)).toFixed(4) : "0");
  const same = first < 0 ? `Both answers are the same ${ofA.length} tokens.` : first === 0 ? "The answers part at the first token." : `The first ${first} tokens are the same.`;
  const worst = ofA.reduce((most, token, i) => (token.kl > (ofA[most]?.kl ?? -1) ? i : most), -1);
  const where = worst < 0 ? "" : `; the largest is ${ofA[worst].kl.toFixed(3)}, at token ${worst + 1} of A (${visible(ofA[worst].text)})`;
  return `${same} Mean KL divergence of B from A: ${over(ofA)} along A's answer, ${over(ofB)} along B's${where}.`;
}

function busy(on) {
  $("stop").hidden = !on;
  $("send").hidden = on;
}

async function listModels() {
  try {
    const models = (await (await post("/v1/models")).json()).data.filter((model) => !model.status?.failed), wanted = new URLSearchParams(location.search);
    if (models.length < 2) throw new Error("This server has one model. `ggufmill serve --models FOLDER` serves all of a folder, which can be compared here.");
    const names = models.map((model) => model.id);
    SIDES.forEach((side, i) => {
      $(side).replaceChildren(...names.map((name) => make("option", "", name)));
      $(side).value = names.includes(wanted.get(side)) ? wanted.get(side) : names[i];
      $(side).disabled = false;
    });
    $("send").disabled = false;
    $("error").hidden = true;
  } catch (error) {
    $("error").textContent = error.message;
    $("error").hidden = false;
  }
}

$("key").value = stored(sessionStorage, "ggufmill-key") || "";
$("key").addEventListener("change", () => { stored(sessionStorage, "ggufmill-key", $("key").value); state.described = listModels(); });
$("stop").addEventListener("click", () => state.running?.abort());
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("ask").requestSubmit(); }
});
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!state.running && $("text").value.trim() && !$("send").disabled) compare();
});
state.described = listModels();
