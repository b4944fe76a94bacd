"use strict";
// current: the conversation that is shown, or null; running: what stops the answer that is being written, writing: its message;
// chat: the model has a chat template; model: the one that was chosen, '' where the server has only one; described: ends when the
// server has told of its model; hint: the text of an empty conversation.
const state = { current: null, running: null, writing: null, chat: true, model: "", described: null, hint: "Loading the model's details.", unsaved: false };
const $ = (id) => document.getElementById(id);
