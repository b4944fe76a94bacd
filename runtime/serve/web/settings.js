// Settings, which the browser keeps, and what the server says of its model.

const FIELDS = {
  temperature: "temperature", limit: "max_tokens", top_p: "top_p", top_k: "top_k", min_p: "min_p", dry: "dry_multiplier", mirostat: "mirostat", seed: "seed",
};
const KEPT = ["system", "tools", ...Object.keys(FIELDS)];
const DEFAULTS = { temperature: "temperature", top_p: "top_p", top_k: "top_k", min_p: "min_p", dry: "dry_multiplier", mirostat: "mirostat" };  // field -> name in /props

// The fields of a request that the settings give; one that is empty is the server's to choose.
function requestFields() {
  const request = {};
  for (const [id, name] of Object.entries(FIELDS)) if ($(id).value !== "") request[name] = Number($(id).value);
  if ($("logprobs").checked) Object.assign(request, state.chat ? { logprobs: true, top_logprobs: 5 } : { logprobs: 5 });
  const tools = state.chat ? readTools() : null;
  if (tools?.length) request.tools = tools;
  return request;
}

// The list of functions; null, with the error shown, for a text that is none.
function readTools() {
  const text = $("tools").value.trim();
  let tools = null, error = "";
  try {
    tools = text ? JSON.parse(text) : [];
    if (!Array.isArray(tools)) throw new Error("a list is needed");
  } catch (e) {
    tools = null;
    error = "Not used: " + e.message;
  }
  $("tools-error").textContent = error;
  $("tools-error").hidden = !error;
  return tools;
}

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: "Bearer " + key } : {}) };
}

async function errorMessage(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return response.status + " " + response.statusText;
  }
}

const units = (n, step, names) => {
  let i = 0;
  while (n >= step && i < names.length - 1) { n /= step; i += 1; }
  return (i === 0 || n >= 100 ? Math.round(n) : n.toFixed(n >= 10 ? 1 : 2)) + names[i];
};
const bytes = (n) => units(n, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]);
const count = (n) => units(n, 1000, ["", " K", " M", " B", " T"]);

// Sets the text of an empty conversation, unless a message was sent before the server answered.
function hint(text) {
  state.hint = text;
  const empty = $("empty");
  if (empty) empty.textContent = text;
}

// Lists the models of a server that has several; the one that is chosen is the first that is loaded, or the first.
async function chooseModel() {
  const response = await fetch("/models", { headers: headers() });
  const models = response.ok ? (await response.json()).data : [];
  $("models").replaceChildren(...models.map((model) => {
    const option = make("option", "", model.id);
    option.disabled = Boolean(model.status.failed);
    return option;
  }));
  const usable = models.filter((model) => !model.status.failed);
  state.model = (usable.find((model) => model.status.value === "loaded") || usable[0] || { id: "" }).id;
  $("models").value = state.model;
  $("models-field").hidden = false;
  $("compare").hidden = usable.length < 2;
}

async function describe() {
  let response;
  try {
    response = await fetch("/props" + (state.model ? "?model=" + encodeURIComponent(state.model) : ""), { headers: headers() });
  } catch {
    hint("The server does not answer.");
    return;
  }
  if (response.status === 401) {
    $("key-field").hidden = false;
    panel("side", true);
    hint("This server asks for an API key: enter it in the settings.");
    return;
  }
  if (!response.ok) {
    hint(await errorMessage(response));
    return;
  }
  const props = await response.json(), m = props.model;
  if (props.role === "router") {  // of several models, of which one has to be chosen
    await chooseModel();
    return state.model ? describe() : hint("This server has no models.");
  }
  document.title = props.model_alias + " (ggufmill)";
  $("name").textContent = props.model_alias;
  $("summary").textContent = [m.architecture, bytes(m.bytes), m.bits_per_weight.toFixed(2) + " bits per weight"].join(", ");
  for (const [id, name] of Object.entries(DEFAULTS)) {
    const value = props.default_generation_settings.params[name];
    if (value !== undefined) $(id).placeholder = String(value);
  }
  if (!$("temperature").placeholder) $("temperature").placeholder = "0.8";
  state.chat = props.chat_template !== "";
  $("system-field").hidden = $("tools-field").hidden = !state.chat;
  $("message").placeholder = state.chat ? "Write a message" : "Write a text to be continued";
  hint(state.chat
    ? "Ask something. Conversations stay in this browser."
    : "This model has no chat template: it continues the text that you write.");
  const facts = [
    ["Name", m.name], ["File", m.file], ["Architecture", m.architecture], ["Parameters", count(m.parameters)],
    ["Size", bytes(m.bytes)], ["Bits per weight", m.bits_per_weight.toFixed(3)], ["Layers", m.layers],
    ["Vocabulary", m.vocabulary.toLocaleString("en")], ["Context", m.n_ctx.toLocaleString("en") + " tokens"],
    ["Trained for", m.n_ctx_train.toLocaleString("en") + " tokens"],
  ];
  const named = { quantized_by: "Quantised by", size_label: "Size label", made_with: "Made with ggufmill", license: "Licence", imatrix: "Imatrix",
    imatrix_text: "Imatrix text", imatrix_chunks: "Imatrix chunks", imatrix_entries: "Imatrix entries", author: "Author",
    organization: "Organisation", description: "Description" };
  for (const [key, label] of Object.entries(named)) if (m.about[key] !== undefined) facts.push([label, m.about[key]]);
  $("facts").replaceChildren(...facts.flatMap(([label, value]) => [make("dt", "", label), make("dd", "", String(value))]));
  $("types").replaceChildren(...m.types.map((t) => {
    const row = make("div"), track = make("span", "track"), bar = make("i");
    bar.style.width = 100 * t.bytes / (m.bytes || 1) + "%";
    track.append(bar);
    row.setAttribute("role", "listitem");
    row.title = t.tensors + " tensors, " + count(t.parameters) + " parameters";
    row.append(make("span", "name", t.type), track, make("span", "size", bytes(t.bytes)));
    return row;
  }));
  $("recipe-part").hidden = !m.about.recipe;
  $("recipe").textContent = m.about.recipe || "";
  $("model").hidden = false;
  if (!state.chat && state.current && !state.running) drawConversation();  // it was drawn as a chat
  for (const turn of document.querySelectorAll(".turn.assistant")) nameTurn(turn, props.model_alias);
}

$("key").value = stored(sessionStorage, "ggufmill-key") || "";
$("key").addEventListener("change", () => { stored(sessionStorage, "ggufmill-key", $("key").value); state.described = describe(); });
$("key-field").addEventListener("submit", (event) => event.preventDefault());
for (const id of KEPT) {
  $(id).value = stored(localStorage, "ggufmill-" + id) || "";
  $(id).addEventListener("change", () => stored(localStorage, "ggufmill-" + id, $(id).value));
}
$("tools").addEventListener("change", readTools);
$("models").addEventListener("change", () => {
  state.model = $("models").value;
  hint("Loading the model.");
  state.described = describe();
});
$("logprobs").checked = stored(localStorage, "ggufmill-logprobs") !== "off";
$("logprobs").addEventListener("change", () => stored(localStorage, "ggufmill-logprobs", $("logprobs").checked ? "on" : "off"));
$("defaults").addEventListener("click", () => {
  for (const id of KEPT) {
    $(id).value = "";
    stored(localStorage, "ggufmill-" + id, null);
  }
  say("All settings are the server's");
});
