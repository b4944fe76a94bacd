// Versions of an answer. The message before it keeps them: `answers` has for each version the messages from the answer to the end
// of the conversation, and null for the one that is shown, number `shown`, whose messages are the conversation's own.

// Keeps what follows a message of the conversation as a version, and begins another one.
function newVersion(messages, question) {
  question.answers ??= [null];
  question.answers[question.shown ?? 0] = messages.splice(messages.indexOf(question) + 1);
  question.shown = question.answers.push(null) - 1;
}

// Shows another version of what follows a message.
function showVersion(messages, question, number) {
  question.answers[question.shown] = messages.splice(messages.indexOf(question) + 1);
  messages.push(...question.answers[number]);
  question.answers[number] = null;
  question.shown = number;
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

// The message before an answer of the current conversation.
const questionOf = (message) => state.current?.messages[state.current.messages.indexOf(message) - 1];

// ◀ 2/3 ▶ for an answer that has versions, else null.
function versionsNode(message) {
  const question = questionOf(message);
  if (!question?.answers) return null;
  const { answers, shown } = question, node = make("span", "versions");
  node.setAttribute("role", "group");
  node.setAttribute("aria-label", "Versions of this answer");
  const step = (sign, name, by) => {
    const button = action(sign, () => chooseVersion(question, shown + by, name), name);
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
function chooseVersion(question, number, name) {
  if (state.running) return;
  const { messages } = state.current, top = $("log").scrollTop;
  showVersion(messages, question, number);
  saveConversation(state.current);
  drawConversation();
  $("log").scrollTop = top;
  const turn = [...$("log").children].find((one) => one.message === messages[messages.indexOf(question) + 1]);
  turn.scrollIntoView({ block: "nearest" });
  const buttons = [...turn.querySelectorAll(".versions button:not(:disabled)")];
  (buttons.find((one) => one.title === name) ?? buttons[0]).focus({ preventScroll: true });
  say(`Version ${number + 1} of ${question.answers.length}: ${answerText(turn.message).slice(0, 4000)}`);
}
