// Markdown as DOM nodes. Text of the model is only ever set as text: no markup of its own reaches the page.

const make = (tag, name, text) => {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  return node;
};

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])( *\1){2,}\s*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const TABLE_LINE = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MOST_DEPTH = 12;  // of quotes and lists in one another

// Text -> blocks {kind, lines, ...}: each stands for a run of lines of the text.
function blocks(lines, depth = 0) {
  const out = [];
  let i = 0;
  const take = (kind, more) => out.push({ kind, ...more });
  while (i < lines.length) {
    const line = lines[i];
    if (!line.trim()) { i += 1; continue; }
    const fence = FENCE.exec(line);
    if (fence) {
      const end = new RegExp("^ {0,3}" + fence[1][0] + "{" + fence[1].length + ",}\\s*$"), body = [];
      for (i += 1; i < lines.length && !end.test(lines[i]); i += 1) body.push(lines[i]);
      i += 1;
      take("code", { language: fence[2], text: body.join("\n") });
      continue;
    }
    const heading = HEADING.exec(line);
    if (heading) { take("heading", { level: heading[1].length, text: heading[2] }); i += 1; continue; }
    if (RULE.test(line)) { take("rule"); i += 1; continue; }
    if (/^ {0,3}>/.test(line) && depth < MOST_DEPTH) {
      const body = [];
      for (; i < lines.length && /^ {0,3}>/.test(lines[i]); i += 1) body.push(lines[i].replace(/^ {0,3}> ?/, ""));
      take("quote", { blocks: blocks(body, depth + 1) });
      continue;
    }
    if (ITEM.test(line) && depth < MOST_DEPTH) {
      const list = listAt(lines, i, depth);
      i = list.next;
      take("list", list);
      continue;
    }
    if (line.includes("|") && i + 1 < lines.length && lines[i + 1].includes("-") && TABLE_LINE.test(lines[i + 1])) {
      const rows = [cells(line)], align = cells(lines[i + 1]);
      for (i += 2; i < lines.length && lines[i].includes("|") && lines[i].trim(); i += 1) rows.push(cells(lines[i]));
      take("table", { rows, align });
      continue;
    }
    const body = [line];
    for (i += 1; i < lines.length && lines[i].trim() && !starts(lines[i]); i += 1) body.push(lines[i]);
    take("paragraph", { text: body.map((l) => l.trim()).join("\n") });
  }
  return out;
}
const starts = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || /^ {0,3}>/.test(line) || ITEM.test(line);
const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replace(/\\\|/g, "|"));

function listAt(lines, start, depth) {
  const [, indent, mark] = ITEM.exec(lines[start]), ordered = /\d/.test(mark), items = [];
  let i = start;
  while (i < lines.length) {
    const found = ITEM.exec(lines[i]);
    if (!found || found[1].length > indent.length + 1 || found[1].length < indent.length || /\d/.test(found[2]) !== ordered) break;
    if (RULE.test(lines[i])) break;
    const width = found[1].length + found[2].length + 1, body = [lines[i].slice(found[0].length)];
    for (i += 1; i < lines.length; i += 1) {
      const inside = /^ */.exec(lines[i])[0].length;
      if (!lines[i].trim()) {
        const after = lines[i + 1];
        if (after === undefined || !after.trim() || /^ */.exec(after)[0].length <= found[1].length) break;
        body.push("");
      } else if (inside > found[1].length) body.push(lines[i].slice(Math.min(inside, width)));
      else if (!starts(lines[i]) && lines[i - 1].trim()) body.push(lines[i]);
      else break;
    }
    items.push(blocks(body, depth + 1));
    while (i < lines.length && !lines[i].trim() && ITEM.test(lines[i + 1] ?? "")) i += 1;
  }
  return { ordered, first: parseInt(mark, 10), items, next: i };
}

const INLINE = new RegExp([
  "(`+)([\\s\\S]*?[^`])\\1(?!`)",                        // 1, 2: code
  "!?\\[([^\\[\\]]{0,500})\\]\\(<?([^\\s<>()]{1,2000})>?(?:\\s+\"[^\"]{0,300}\")?\\)",  // 3, 4: link
  "(https?:\\/\\/[^\\s<>()\\[\\]\"'`]{1,2000})",       // 5: address
  "(\\*\\*|__)(?=\\S)([^\\n]{0,500}?\\S)\\6",            // 6, 7: bold
  "(\\*|(?<![\\w_])_)(?=[^\\s*_])([^\\n]{0,500}?[^\\s*_]|[^\\s*_])\\8(?![\\w*])",  // 8, 9: italic
  "~~(?=\\S)([^\\n]{0,500}?\\S)~~",                      // 10: struck out
  "\\\\([!-/:-@\\[-`{-~])",                               // 11: a sign that is meant
].join("|"));

// Appends the inline parts of a text to a node.
function inline(node, text, depth = 0) {
  let rest = text;
  while (rest) {
    const found = depth < MOST_DEPTH ? INLINE.exec(rest) : null;
    const before = found ? rest.slice(0, found.index) : rest;
    before.split("\n").forEach((line, i) => {
      if (i) node.append(make("br"));
      if (line) node.append(line);
    });
    if (!found) return;
    const [all, , code, label, target, address, , bold, , italic, struck, sign] = found;
    if (code !== undefined) node.append(make("code", "", code.replace(/^ (.*[^ ].*) $/, "$1")));
    else if (target !== undefined) node.append(link(target, label, all));
    else if (address !== undefined) {
      const trail = /[.,;:!?]*$/.exec(address)[0], bare = address.slice(0, address.length - trail.length);
      node.append(link(bare, "", bare), trail);
    } else if (sign !== undefined) node.append(sign);
    else {
      const [tag, inner] = bold !== undefined ? ["strong", bold] : italic !== undefined ? ["em", italic] : ["s", struck];
      const child = make(tag);
      inline(child, inner, depth + 1);
      node.append(child);
    }
    rest = rest.slice(found.index + all.length);
  }
}

// A link to the web or to mail; anything else stays text. Pictures are links too: the page loads nothing.
function link(target, label, all) {
  if (!/^(https?:|mailto:)/i.test(target)) return document.createTextNode(all);
  const a = make("a");
  a.href = target;
  a.target = "_blank";
  a.rel = "noopener noreferrer";
  if (label) inline(a, label, MOST_DEPTH);  // nothing but text: no link in a link
  else a.textContent = target;
  return a;
}

function blockNode(block) {
  if (block.kind === "code") return codeNode(block);
  if (block.kind === "heading") {
    const node = make("h" + Math.min(6, block.level + 2));
    inline(node, block.text);
    return node;
  }
  if (block.kind === "rule") return make("hr");
  if (block.kind === "quote") {
    const node = make("blockquote");
    node.append(...block.blocks.map(blockNode));
    return node;
  }
  if (block.kind === "list") {
    const node = make(block.ordered ? "ol" : "ul");
    if (block.ordered && block.first !== 1) node.start = block.first;
    for (const item of block.items) {
      const li = make("li");
      for (const part of item) {
        if (part.kind === "paragraph" && part === item[0]) inline(li, part.text.replace(/^\[( |x|X)\] /, (_, x) => (x === " " ? "☐ " : "☑ ")));
        else li.append(blockNode(part));
      }
      node.append(li);
    }
    return node;
  }
  if (block.kind === "table") {
    const wide = make("div", "wide"), table = make("table");
    wide.tabIndex = 0;
    wide.setAttribute("role", "region");
    wide.setAttribute("aria-label", "Table");
    block.rows.forEach((row, r) => {
      const tr = make("tr");
      row.slice(0, block.rows[0].length).forEach((cell, c) => {
        const td = make(r ? "td" : "th"), align = block.align[c] ?? "";
        if (!r) td.scope = "col";
        if (align.endsWith(":")) td.style.textAlign = align.startsWith(":") ? "center" : "right";
        inline(td, cell);
        tr.append(td);
      });
      table.append(tr);
    });
    wide.append(table);
    return wide;
  }
  const node = make("p");
  inline(node, block.text);
  return node;
}

function codeNode({ language, text }) {
  const node = make("div", "block"), head = make("div", "head"), pre = make("pre");
  const copy = make("button", "", "Copy");
  copy.type = "button";
  copy.setAttribute("aria-label", "Copy code");
  copy.addEventListener("click", () => copyText(text, copy));
  head.append(make("span", "", language || "text"), copy);
  pre.tabIndex = 0;
  pre.setAttribute("aria-label", "Code");
  pre.setAttribute("role", "region");
  pre.append(make("code", "", text));
  node.append(head, pre);
  return node;
}

// Shows a text in a node. Blocks that are as they were keep their nodes: a selection stays, and long answers stay quick.
function renderMarkdown(node, text) {
  const now = blocks(text.split("\n")), least = Math.min(...now.map((block) => block.level ?? 6));
  for (const block of now) if (block.level) block.level -= least - 1;  // an outline without gaps, for screen readers
  const keys = now.map((block) => JSON.stringify(block)), before = node.keys ?? [];
  let same = 0;
  while (same < keys.length && same < before.length && keys[same] === before[same]) same += 1;
  while (node.childNodes.length > same) node.lastChild.remove();
  node.append(...now.slice(same).map(blockNode));
  node.keys = keys;
}

async function copyText(text, button) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // not allowed, or a page that came over plain HTTP
    const area = make("textarea", "unseen");
    area.value = text;
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
    button.focus();
  }
  const label = button.textContent;
  button.textContent = done ? "Copied" : "Not allowed";
  say(button.textContent);
  setTimeout(() => { button.textContent = label; }, 1500);
}
