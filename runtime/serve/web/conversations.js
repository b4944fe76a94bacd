// Conversations in the browser's storage: {id, title, updated, messages}, with `answers` and `shown` of versions.js. Where storage is forbidden, they last as long as the page.

const PREFIX = "ggufmill-chat-", OPEN = "ggufmill-open";
const conversations = new Map();

function loadConversations() {
  let keys = [];
  try { keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX)); } catch { /* forbidden */ }
  for (const key of keys) {
    try {
      const one = checkedConversation(JSON.parse(stored(localStorage, key)));
      conversations.set(one.id, one);
    } catch { /* another program's, or damaged: left alone */ }
  }
}

// A conversation of a file or of the storage, with nothing in it but what is known. Throws for what is none.
function checkedConversation(value) {
  if (typeof value?.id !== "string" || !Array.isArray(value.messages)) throw new Error("this is not a conversation");
  const checkedMessage = (m) => {
    if (!["user", "assistant", "tool"].includes(m?.role) || typeof m.content !== "string") throw new Error("a message has no role or no content");
    const one = { role: m.role, content: m.content };
    for (const key of ["reasoning", "note", "tool_call_id"]) if (typeof m[key] === "string") one[key] = m[key];
    if (Array.isArray(m.tool_calls) && m.tool_calls.every((c) => typeof c?.function?.name === "string" && typeof c.function.arguments === "string")) {
      one.tool_calls = m.tool_calls.map((c) => ({ id: String(c.id), type: "function", function: { name: c.function.name, arguments: c.function.arguments } }));
    }
    const answers = checkedVersions(m, checkedMessage);
    if (answers) Object.assign(one, { answers, shown: m.shown });
    return one;
  };
  const messages = value.messages.map(checkedMessage);
  dropEmptyVersion(messages);  // which was being written when the page went
  const answers = messages.length ? checkedVersions(value, checkedMessage) : undefined, versions = answers ? { answers, shown: value.shown } : {};
  return { id: value.id.slice(0, 100), title: String(value.title ?? "").slice(0, 200) || "Conversation", updated: Number(value.updated) || 0, messages, ...versions };
}

function saveConversation(one) {
  one.updated = Date.now();
  conversations.set(one.id, one);
  if (!stored(localStorage, PREFIX + one.id, JSON.stringify(one, (key, value) => (key === "tokens" ? undefined : value)))) {
    state.unsaved = true;
  }
  drawList();
}

// Keeps which conversation this tab shows, over a reload.
const keepOpen = (one) => stored(sessionStorage, OPEN, one && one.id);

const byTime = () => [...conversations.values()].sort((a, b) => b.updated - a.updated);

function drawList() {
  $("clear").hidden = !conversations.size;
  const rows = byTime().map((one) => {
    const row = make("li", one === state.current ? "current" : ""), choose = make("button", "choose", one.title);
    choose.type = "button";
    choose.title = one.title;
    if (one === state.current) choose.setAttribute("aria-current", "true");
    choose.addEventListener("click", () => openConversation(one));
    row.append(choose);
    for (const [name, sign, act] of [["Rename", "✎", () => renameIn(row, one)], ["Delete", "✕", () => deleteConversation(one)]]) {
      const button = make("button", "act", sign);
      button.type = "button";
      button.title = name;
      button.setAttribute("aria-label", `${name} ${one.title}`);
      button.addEventListener("click", act);
      row.append(button);
    }
    return row;
  });
  $("conversations").replaceChildren(...rows);
}

function renameIn(row, one) {
  const field = make("input");
  field.value = one.title;
  field.setAttribute("aria-label", "Name of the conversation");
  let ended = false;  // removing a field that has the focus ends it a second time
  const end = (keep) => {
    if (ended) return;
    ended = true;
    if (keep && field.value.trim()) one.title = field.value.trim().slice(0, 200);
    saveConversation(one);
    $("conversations").querySelector(".choose")?.focus();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === "Escape") {
      event.preventDefault();
      event.stopPropagation();
      end(event.key === "Enter");
    }
  });
  field.addEventListener("blur", () => end(true));
  row.replaceChildren(field);
  field.select();
}

function deleteConversation(one) {
  if (!confirm(`Delete "${one.title}"?`)) return;
  conversations.delete(one.id);
  stored(localStorage, PREFIX + one.id, null);
  if (one === state.current) openConversation(null);
  else drawList();
}

$("clear").addEventListener("click", () => {
  const n = conversations.size;
  if (!confirm(n === 1 ? "Delete the conversation that this browser keeps?" : `Delete all ${n} conversations that this browser keeps?`)) return;
  for (const id of conversations.keys()) stored(localStorage, PREFIX + id, null);
  conversations.clear();
  openConversation(null);
  say("All conversations are deleted");
});
$("export").addEventListener("click", () => {
  const text = JSON.stringify({ conversations: [...conversations.values()] }, (key, value) => (key === "tokens" ? undefined : value), 1);
  const a = make("a");
  a.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  a.download = "conversations.json";
  a.click();
  setTimeout(() => URL.revokeObjectURL(a.href), 60000);
});
$("import").addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", async () => {
  const file = $("import-file").files[0];
  $("import-file").value = "";
  if (file) importConversations(await file.text());
});

// Adds the conversations of an exported file: all of them, or none of a file that is no such file.
function importConversations(text) {
  let added;
  try {
    added = JSON.parse(text).conversations.map(checkedConversation);
  } catch (error) {
    alert("These are not exported conversations: " + error.message);
    return;
  }
  for (const one of added) {
    if (conversations.has(one.id)) one.id = newId();  // never over another one
    const { updated } = one;
    saveConversation(one);
    one.updated = updated || one.updated;
  }
  drawList();
  say(`${added.length} conversations imported`);
}

const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 10);
