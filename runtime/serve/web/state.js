"use strict";
// current: the conversation that is shown, or null; running: what stops the answer that is being written, writing: its message;
// chat: the model has a chat template; model: the one that was chosen, '' where the server has only one; described: ends when the
// server has told of its model; hint: the text of an empty conversation.
const state = { current: null, running: null, writing: null, chat: true, model: "", described: null, hint: "Loading the model's details.", unsaved: false };
const $ = (id) => document.getElementById(id);

// Reads or, with a value, writes an item of a storage; null removes it. Returns whether that worked.
const stored = (storage, key, value) => {
  try {
    if (value === undefined) return storage.getItem(key);
    if (value === null) storage.removeItem(key);
    else storage.setItem(key, value);
    return true;
  } catch {
    return value === undefined ? null : false;
  }
};

// The events of a stream, read from JSON.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    buffer += value;
    const lines = buffer.split("\n");
    buffer = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      yield JSON.parse(line.slice(6));
    }
  }
}
