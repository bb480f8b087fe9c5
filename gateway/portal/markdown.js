// Markdown as nodes. It knows what models write: headings, lists, tables, code, emphasis and links. Anything else is text.
function inline(text) {
  const nodes = [],
    pattern = /`([^`]+)`|\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*|\[([^[\]]{1,500})\]\((https?:\/\/[^\s)]+)\)/g;
  let end = 0;
  for (const match of text.matchAll(pattern)) {
    nodes.push(text.slice(end, match.index));
    const [whole, code, strong, emphasis, title, link] = match;
    if (code !== undefined) nodes.push(el("code", {}, code));
    else if (strong !== undefined) nodes.push(el("strong", {}, ...inline(strong)));
    else if (emphasis !== undefined) nodes.push(el("em", {}, ...inline(emphasis)));
    else nodes.push(el("a", { href: link, rel: "noreferrer noopener", target: "_blank" }, title));
    end = match.index + whole.length;
  }
  nodes.push(text.slice(end));
  return nodes;
}

const ITEM = /^\s*([-*+]|\d+[.)])\s+(.*)$/,
  HEADING = /^(#{1,6})\s+(.*)$/,
  FENCE = /^\s*```(.*)$/,
  ROW = /^\s*\|(.*)\|\s*$/;
const cells = (line) =>
  ROW.exec(line)[1]
    .split("|")
    .map((cell) => cell.trim());
const starts = (line) => ITEM.test(line) || HEADING.test(line) || FENCE.test(line) || ROW.test(line) || !line.trim();

function markdown(text) {
  const lines = text.split("\n"),
    blocks = [];
  for (let at = 0; at < lines.length;) {
    const line = lines[at];
    if (FENCE.test(line)) {
      const from = ++at;
      while (at < lines.length && !FENCE.test(lines[at])) at++;
      blocks.push(codeBlock(lines.slice(from, at++).join("\n")));
    } else if (HEADING.test(line)) {
      blocks.push(el("h3", {}, ...inline(HEADING.exec(line)[2])));
      at++;
    } else if (ITEM.test(line)) {
      const made = el(/\d/.test(ITEM.exec(line)[1]) ? "ol" : "ul");
      for (; at < lines.length && ITEM.test(lines[at]); at++) made.append(el("li", {}, ...inline(ITEM.exec(lines[at])[2])));
      blocks.push(made);
    } else if (ROW.test(line) && /^[\s|:-]+$/.test(lines[at + 1] ?? "")) {
      const body = el("tbody"),
        head = el("tr", {}, ...cells(line).map((cell) => el("th", { scope: "col" }, ...inline(cell))));
      for (at += 2; at < lines.length && ROW.test(lines[at]); at++)
        body.append(el("tr", {}, ...cells(lines[at]).map((cell) => el("td", {}, ...inline(cell)))));
      blocks.push(el("div", { className: "scroll" }, el("table", {}, el("thead", {}, head), body)));
    } else if (!line.trim()) at++;
    else {
      const from = at++;
      while (at < lines.length && !starts(lines[at])) at++;
      blocks.push(el("p", {}, ...inline(lines.slice(from, at).join("\n"))));
    }
  }
  return blocks;
}
