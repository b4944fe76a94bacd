// An answer token by token: the less probable one was, the stronger its background; the others that might have come stand in a tip.

// A chunk's log probabilities, of either API, as [{text, logprob, top: [[text, logprob]]}].
function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) return logprobs.content.map((t) => ({ text: t.token, logprob: t.logprob, top: t.top_logprobs.map((o) => [o.token, o.logprob]) }));
  return (logprobs.tokens ?? []).map((text, i) => ({ text, logprob: logprobs.token_logprobs[i], top: Object.entries(logprobs.top_logprobs?.[i] ?? {}) }));
}

const percent = (logprob) => {
  const p = 100 * Math.exp(logprob);
  return (p >= 99.95 || p < 0.05 ? p.toFixed(0) : p.toFixed(1)) + " %";
};
const visible = (text) => text.replace(/\n/g, "↵").replace(/ /g, "␣").replace(/\t/g, "⇥") || "(nothing)";

function tokenView(tokens) {
  const view = make("div", "tokens");
  view.setAttribute("role", "group");
  view.setAttribute("aria-label", "Tokens and their probabilities; arrow keys go from one to the next");
  tokens.forEach((token, i) => {
    const p = Math.exp(token.logprob), span = make("span", "sure-" + (p < 0.1 ? 1 : p < 0.3 ? 2 : p < 0.6 ? 3 : p < 0.9 ? 4 : 5), token.text);
    span.tabIndex = i ? -1 : 0;
    span.token = token;
    span.setAttribute("role", "img");
    span.setAttribute("aria-label", `${visible(token.text)} ${percent(token.logprob)}`);
    view.append(span);
  });
  connectTokens(view, showTip);
  return view;
}

// Lets the pointer and the arrow keys go over a view of tokens. show: shows the tip of one.
function connectTokens(view, show) {
  const near = (event) => event.target.closest?.(".tokens span");
  view.addEventListener("pointerover", (event) => { if (near(event)) show(near(event)); });
  view.addEventListener("pointerout", hideTip);
  view.addEventListener("focusin", (event) => { if (near(event)) show(near(event)); });
  view.addEventListener("focusout", hideTip);
  view.addEventListener("click", (event) => near(event)?.focus());
  view.addEventListener("keydown", (event) => {
    const span = near(event), next = { ArrowRight: span?.nextSibling, ArrowLeft: span?.previousSibling, Home: view.firstChild, End: view.lastChild }[event.key];
    if (!span || !next) return;
    event.preventDefault();
    span.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
}

function showTip(span) {
  const { text, logprob, top } = span.token, rows = [...top].sort((a, b) => b[1] - a[1]);
  if (!rows.some(([other]) => other === text)) rows.push([text, logprob]);
  placeTip(span, rows.map(([other, value]) => {
    const row = make("div", other === text ? "taken" : "");
    row.append(make("span", "", visible(other)), make("span", "", percent(value)));
    return row;
  }));
}

// Shows rows in the tip beside a token.
function placeTip(span, rows) {
  $("tip").replaceChildren(...rows);
  $("tip").hidden = false;
  span.setAttribute("aria-describedby", "tip");
  const at = span.getBoundingClientRect(), tip = $("tip").getBoundingClientRect();
  const above = at.top - tip.height - 6;
  $("tip").style.left = Math.max(6, Math.min(at.left, innerWidth - tip.width - 6)) + "px";
  $("tip").style.top = (above > 6 ? above : Math.min(at.bottom + 6, innerHeight - tip.height - 6)) + "px";
}

function hideTip() {
  $("tip").hidden = true;
}
