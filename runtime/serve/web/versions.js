// Versions of an answer that was regenerated, and of a question that was changed. The message before it keeps them, and the
// conversation itself those of its first message: `answers` has for each version the messages from there to the end of the
// conversation, and null for the one that is shown, number `shown`, whose messages are the conversation's own.

// Keeps what follows a message of the conversation, or all of it, as a version, and begins another one.
function newVersion(messages, keeper) {
  keeper.answers ??= [null];
  keeper.answers[keeper.shown ?? 0] = messages.splice(messages.indexOf(keeper) + 1);
  keeper.shown = keeper.answers.push(null) - 1;
}

// Shows another version of what follows a message, or of all of the conversation.
function showVersion(messages, keeper, number) {
  keeper.answers[keeper.shown] = messages.splice(messages.indexOf(keeper) + 1);
  messages.push(...keeper.answers[number]);
  keeper.answers[number] = null;
  keeper.shown = number;
}

// Goes back to the version before one that came to nothing. Returns whether there is one.
function dropEmptyVersion(messages) {
  const question = messages.at(-1);
  if (!question?.answers) return false;
  question.answers.splice(question.shown, 1);
  question.shown = question.answers.length - 1;
  messages.push(...question.answers[question.shown]);
  question.answers[question.shown] = null;
  if (question.answers.length === 1) {
    delete question.answers;
    delete question.shown;
  }
  return true;
}

// The versions of a file or of the storage; undefined for what are none.
function checkedVersions({ answers, shown }, checkedMessage) {
  const whole = (tail, i) => (i === shown ? tail === null : Array.isArray(tail) && tail.length > 0);
  if (!Array.isArray(answers) || answers.length < 2 || !answers.every(whole) || answers[shown] !== null) return undefined;
  return answers.map((tail) => tail && tail.map(checkedMessage));
}

// What keeps the versions of a message of the current conversation; undefined for one that is not part of it yet.
function keeperOf(message) {
  const messages = state.current?.messages ?? [], at = messages.indexOf(message);
  return at ? messages[at - 1] : state.current;
}

// ◀ 2/3 ▶ for a message that has versions, else null.
function versionsNode(message) {
  const keeper = keeperOf(message);
  if (!keeper?.answers) return null;
  const { answers, shown } = keeper, node = make("span", "versions");
  node.setAttribute("role", "group");
  node.setAttribute("aria-label", message.role === "user" ? "Versions of this question" : "Versions of this answer");
  const step = (sign, name, by) => {
    const button = action(sign, () => chooseVersion(keeper, shown + by, name), name);
    button.title = name;
    button.disabled = !answers[shown + by];
    return button;
  };
  const place = make("span", "", `${shown + 1}/${answers.length}`);
  place.setAttribute("aria-label", `Version ${shown + 1} of ${answers.length}`);
  place.setAttribute("role", "img");
  node.append(step("◀", "Previous version", -1), place, step("▶", "Next version", 1));
  return node;
}

// Shows a version, and leaves the focus on the same button, or on the other one at the last version.
function chooseVersion(keeper, number, name) {
  if (state.running) return;
  const { messages } = state.current, top = $("log").scrollTop;
  showVersion(messages, keeper, number);
  saveConversation(state.current);
  drawConversation();
  $("log").scrollTop = top;
  const turn = [...$("log").children].find((one) => one.message === messages[messages.indexOf(keeper) + 1]);
  turn.scrollIntoView({ block: "nearest" });
  const buttons = [...turn.querySelectorAll(".versions button:not(:disabled)")];
  (buttons.find((one) => one.title === name) ?? buttons[0]).focus({ preventScroll: true });
  say(`Version ${number + 1} of ${keeper.answers.length}: ${answerText(turn.message).slice(0, 4000)}`);
}
