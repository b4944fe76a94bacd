// The conversation: turns, requests and their streams, the list and the settings beside it, the keyboard.

// A line for screen readers. Answers are told when they are whole: word by word nobody could follow them.
function say(text) {
  $("status").textContent = text;
}

// --- turns ---------------------------------------------------------------------------------------------------------

function action(label, act, description = label) {
  const button = make("button", "", label);
  button.type = "button";
  if (description !== label) button.setAttribute("aria-label", description);
  button.addEventListener("click", () => act(button));
  return button;
}

// The node of a message, with its actions.
function turnOf(message) {
  const turn = make("article", "turn " + message.role), who = message.role === "assistant" ? $("name").textContent : message.role === "tool" ? "Function" : "You";
  turn.append(make("h2", "who"), make("div", "text"), make("div", "acts"));
  nameTurn(turn, who);
  turn.message = message;
  drawTurn(turn);
  return turn;
}

function nameTurn(turn, who) {
  turn.setAttribute("aria-label", who);
  turn.firstChild.textContent = who;
}

function drawTurn(turn) {
  const { message } = turn, text = turn.querySelector(".text"), acts = turn.querySelector(".acts");
  if (message.role !== "assistant") {
    text.textContent = message.content;
    const edit = action("Edit", () => editTurn(turn), "Edit and send again");
    const copy = action("Copy", (button) => copyText(message.content, button), "Copy message"), versions = versionsNode(message);
    acts.replaceChildren(...(versions ? [versions] : []), copy, ...(message.role === "user" ? [edit] : []));
    return;
  }
  drawAnswer(text, message);
  if (turn.classList.contains("busy")) return;
  const again = action("Regenerate", () => regenerate(turn));
  const parts = [action("Copy", (button) => copyText(answerText(message), button), "Copy answer"), again];
  const versions = versionsNode(message);
  if (versions) parts.unshift(versions);
  if (message.tokens?.length) {
    const tokens = action("Tokens", () => showTokens(turn, tokens), "Show tokens with their probabilities");
    tokens.setAttribute("aria-pressed", "false");
    parts.push(tokens);
  }
  if (message.note) parts.push(make("span", "note", message.note));
  acts.replaceChildren(...parts);
}

// Reasoning that the server left in the text stands before </think>.
function splitReasoning(message) {
  if (message.reasoning) return [message.reasoning, message.content];
  const match = /^\s*<think>([\s\S]*?)(<\/think>|$)/.exec(message.content);
  return match ? [match[1].trim(), message.content.slice(match[0].length).replace(/^\s+/, "")] : ["", message.content];
}
const answerText = (message) => splitReasoning(message)[1];

// Thoughts (folded), the text, and calls of functions.
function drawAnswer(text, message) {
  const [reasoning, content] = splitReasoning(message);
  let thoughts = text.querySelector(".thoughts"), answer = text.querySelector(".answer");
  if (!answer) {
    answer = make("div", "answer");
    text.replaceChildren(answer);
  }
  if (reasoning) {
    if (!thoughts) {
      thoughts = make("details", "thoughts");
      thoughts.append(make("summary"), make("div"));
      text.prepend(thoughts);
    }
    thoughts.firstChild.textContent = content || message.tool_calls ? "Thoughts" : "Thinking";
    thoughts.lastChild.textContent = reasoning;
  }
  if (state.chat) renderMarkdown(answer, content);
  else {
    answer.textContent = content;
    answer.style.whiteSpace = "pre-wrap";
  }
  text.querySelector(".calls")?.remove();
  if (message.tool_calls?.length) text.append(callsNode(message));
}

// The calls of an answer, with fields for what they return unless that was sent already.
function callsNode(message) {
  const node = make("div", "calls"), fields = [];
  const open = state.current?.messages.at(-1) === message && !state.running;
  for (const call of message.tool_calls) {
    const pre = make("pre", "", pretty(call.function.arguments));
    pre.tabIndex = 0;
    pre.setAttribute("role", "region");
    pre.setAttribute("aria-label", "Arguments of " + call.function.name);
    node.append(make("p", "call", "Calls " + call.function.name), pre);
    if (open) {
      const label = make("label", "", "What it returns"), field = make("textarea");
      label.append(field);
      node.append(label);
      fields.push([call, field]);
    }
  }
  if (open) {
    node.append(action("Send", () => {
      for (const [call, field] of fields) state.current.messages.push({ role: "tool", tool_call_id: call.id, content: field.value });
      saveConversation(state.current);
      drawConversation();
      answerNext();
    }, "Send what the functions return"));
  }
  return node;
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;  // not whole yet
  }
}

function showTokens(turn, button) {
  const on = button.getAttribute("aria-pressed") !== "true", text = turn.querySelector(".text");
  button.setAttribute("aria-pressed", String(on));
  if (on) text.replaceChildren(tokenView(turn.message.tokens));
  else {
    text.replaceChildren();
    drawAnswer(text, turn.message);
  }
}

function editTurn(turn) {
  if (state.running) return;
  const { message } = turn, edit = make("div", "edit"), field = make("textarea"), row = make("div");
  field.value = message.content;
  field.setAttribute("aria-label", "Message");
  const cancel = () => {
    edit.replaceWith(make("div", "text"));
    drawTurn(turn);
    turn.querySelector(".acts button:last-child").focus();
  };
  const send = () => {
    if (!field.value.trim() || state.running) return;
    const { messages } = state.current;
    if (messages.at(-1) === message) messages.pop();  // it was never answered
    else newVersion(messages, keeperOf(message));
    ask(field.value.trim());
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.stopPropagation(); cancel(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  const again = action("Send", send, "Send the changed message");
  again.className = "main";
  row.append(action("Cancel", cancel), again);
  edit.append(field, row);
  turn.querySelector(".text").replaceWith(edit);
  turn.querySelector(".acts").replaceChildren();
  field.style.height = Math.min(field.scrollHeight + 4, innerHeight / 2) + "px";
  field.focus();
}

function regenerate(turn) {
  if (state.running) return;
  const keeper = keeperOf(turn.message);
  if (keeper) newVersion(state.current.messages, keeper);
  drawConversation();
  answerNext();
}

// --- the conversation -----------------------------------------------------------------------------------------------

const nearEnd = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 80;
const toEnd = () => { $("log").scrollTop = $("log").scrollHeight; };

function drawConversation() {
  const turns = (state.current?.messages ?? []).map(turnOf);
  if (!turns.length) {
    const empty = make("p", "empty", state.hint), [latest] = byTime();
    empty.id = "empty";
    turns.push(empty);
    if (latest) {
      const row = make("p", "latest");
      row.append(action("Continue: " + latest.title, () => openConversation(latest)));
      turns.push(row);
    }
  }
  $("log").replaceChildren(...turns);
  toEnd();
}

// Shows a conversation; null: an empty one, which is kept from its first message on.
function openConversation(one) {
  state.running?.abort();
  state.current = one;
  keepOpen(one);
  drawConversation();
  drawList();
  if (narrow.matches) panel("list", false);
  $("message").focus();
}

async function ask(text) {
  if (!state.current) state.current = { id: newId(), title: text.replace(/\s+/g, " ").slice(0, 60), updated: 0, messages: [] };
  const { messages } = state.current;
  if (messages.at(-1)?.role === "user") messages.pop();  // it was never answered
  messages.push({ role: "user", content: text });
  saveConversation(state.current);
  keepOpen(state.current);
  drawConversation();
  await answerNext();
}

// Adds what a chunk brings to a message.
function addChunk(message, { choices, timings }) {
  const choice = choices[0], delta = choice?.delta ?? {};
  if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
  message.content += delta.content ?? choice?.text ?? "";
  for (const call of delta.tool_calls ?? []) {
    message.tool_calls ??= [];
    const one = message.tool_calls[call.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } };
    if (call.id) one.id = call.id;
    one.function.name += call.function?.name ?? "";
    one.function.arguments += call.function?.arguments ?? "";
  }
  message.tokens.push(...tokensOf(choice?.logprobs));
  if (timings) {
    const why = choice?.finish_reason === "length" ? ", cut off at the limit" : "";
    message.note = `${timings.predicted_n} tokens, ${timings.predicted_per_second.toFixed(1)} per second; `
      + `prompt ${timings.prompt_n} at ${timings.prompt_per_second.toFixed(0)} per second, ${timings.cache_n} cached${why}`;
  }
}

// Has the model answer the current conversation.
async function answerNext() {
  const conversation = state.current, running = state.running = new AbortController();
  const message = state.writing = { role: "assistant", content: "", tokens: [] };
  let turn = turnOf(message);
  const text = turn.querySelector(".text");
  turn.classList.add("busy");
  turn.setAttribute("aria-busy", "true");
  turn.querySelector(".acts").replaceChildren();
  $("log").append(turn);
  toEnd();
  busy(true);
  say("The answer is being written");
  let drawing = false, problem = "";
  const draw = () => {
    drawing = false;
    const follow = nearEnd();
    if (turn.classList.contains("busy")) drawAnswer(text, message);
    if (follow) toEnd();
  };
  try {
    await state.described;  // sets state.chat
    const request = { stream: true, ...(state.model ? { model: state.model } : {}), ...requestFields() };
    if (state.chat) {
      const system = $("system").value.trim(), sent = conversation.messages.map(({ role, content, tool_calls, tool_call_id }) => ({ role, content, tool_calls, tool_call_id }));
      request.messages = [...(system ? [{ role: "system", content: system }] : []), ...sent];
    } else {
      request.prompt = conversation.messages.at(-1).content;
    }
    const response = await fetch(state.chat ? "/v1/chat/completions" : "/v1/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(request), signal: running.signal,
    });
    if (!response.ok) throw new Error(await errorMessage(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      addChunk(message, event);
      if (!drawing) { drawing = true; requestAnimationFrame(draw); }
    }
  } catch (error) {
    if (running.signal.aborted) message.note ??= "Stopped.";
    else problem = error.message;
  }
  const isCurrent = state.current === conversation, kept = !problem || message.content;
  if (state.running === running) {
    state.running = null;
    busy(false);
  }
  if (kept && conversations.has(conversation.id)) {
    conversation.messages.push(message);
    saveConversation(conversation);
  }
  if (!kept && dropEmptyVersion(conversation.messages) && isCurrent) {
    drawConversation();
    turn = $("log").lastElementChild;
  }
  if (!isCurrent) return;
  const follow = nearEnd();
  turn.classList.remove("busy");
  turn.removeAttribute("aria-busy");
  drawTurn(turn);
  if (problem) {
    const note = make("p", "note bad", problem);
    note.setAttribute("role", "alert");
    turn.querySelector(".acts").before(note);
  }
  if (state.unsaved) {
    turn.querySelector(".acts").append(make("span", "note bad", "This browser has no room to keep the conversation: export or delete some."));
    state.unsaved = false;
  }
  if (follow) toEnd();
  say(problem || "Answer: " + answerText(message).slice(0, 4000));
  if ([document.body, $("stop"), null].includes(document.activeElement)) $("message").focus();
}

// --- controls -------------------------------------------------------------------------------------------------------

function busy(on) {
  $("stop").hidden = !on;
  $("send").hidden = on;
}

function grow() {
  $("message").style.height = "auto";
  $("message").style.height = $("message").scrollHeight + "px";
}

const narrow = matchMedia("(max-width: 60rem)");
const BUTTONS = { list: "open-list", side: "open" };

// Opens or closes the list or the settings. On a narrow screen one of them at most is open.
function panel(id, open) {
  const other = id === "list" ? "side" : "list";
  if (open && narrow.matches) panel(other, false);
  const follow = nearEnd();
  $(id).hidden = !open;
  $(BUTTONS[id]).setAttribute("aria-expanded", String(open));
  if (follow) toEnd();
}

for (const [id, button] of Object.entries(BUTTONS)) {
  $(button).addEventListener("click", () => {
    panel(id, $(id).hidden);
    if (narrow.matches && !$(id).hidden) $(id).querySelector("button, input, textarea").focus({ preventScroll: true });
  });
}
const arrange = () => {
  panel("list", !narrow.matches);
  panel("side", !narrow.matches && innerWidth > 1150);
};
narrow.addEventListener("change", arrange);

$("write").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("message").value.trim();
  if (!text || state.running) return;
  $("message").value = "";
  grow();
  ask(text);
});
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("write").requestSubmit();
  }
});
$("message").addEventListener("input", grow);
$("stop").addEventListener("click", () => state.running?.abort());
$("reset").addEventListener("click", () => openConversation(null));
$("to-end").addEventListener("click", toEnd);
$("log").addEventListener("scroll", () => { $("to-end").hidden = nearEnd(); hideTip(); });
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented) return;
  const inside = Object.keys(BUTTONS).find((id) => !$(id).hidden && (narrow.matches || $(id).contains(document.activeElement)));
  if (!$("tip").hidden) hideTip();
  else if (state.running) state.running.abort();
  else if (inside) {
    panel(inside, false);
    $(BUTTONS[inside]).focus();
  }
});

// What there is of an answer when the page goes is kept at once: what runs after this may not be carried out any more.
addEventListener("pagehide", () => {
  const { current, running, writing } = state;
  if (!running) return;
  writing.note = "Stopped: the page was left.";
  if (current && (writing.content || writing.reasoning)) saveConversation({ ...current, messages: [...current.messages, writing] });
  running.abort();
});

loadConversations();
state.current = conversations.get(stored(sessionStorage, OPEN)) ?? null;  // a reload goes on with it
drawList();
drawConversation();
arrange();
state.described = describe();
