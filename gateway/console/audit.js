const FILTERS = ["action", "actor", "target", "since"];
const AUDIT = "/admin/v1/audit";
const MOST = 200; // characters of a value that are shown at once
const address = () => Object.fromEntries([...new URLSearchParams(location.search)].filter(([name]) => FILTERS.includes(name)));
let cursor = null;

const written = (value) => (typeof value === "string" ? value : JSON.stringify(value));
function shownValue(tag, value) {
  const text = written(value);
  if (text.length <= MOST) return el(tag, {}, text);
  const all = el("button", { type: "button", className: "plain" }, "all");
  const node = el(tag, {}, `${text.slice(0, MOST)}… `, all);
  all.addEventListener("click", () => node.replaceChildren(text));
  return node;
}
// Only what differs: removed values are struck through, and words say it to screen readers.
function difference(entry) {
  const before = entry.before ?? {},
    after = entry.after ?? {};
  const names = [...new Set([...Object.keys(before), ...Object.keys(after)])].filter(
    (name) => written(before[name] ?? null) !== written(after[name] ?? null),
  );
  if (!names.length) return "–";
  const lines = names.map((name) => {
    const line = el("li", {}, el("span", { className: "quiet" }, `${name}: `));
    if (name in before) line.append(el("span", { className: "hidden" }, "before "), shownValue("del", before[name]));
    if (name in before && name in after) line.append(" → ");
    if (name in after) line.append(el("span", { className: "hidden" }, "after "), shownValue("ins", after[name]));
    return line;
  });
  return el("ul", { className: "difference" }, ...lines);
}
const COLUMNS = [
  { title: "Time", value: (entry) => when(Date.parse(entry.time) / 1000) },
  { title: "Who", value: (entry) => [entry.actor, ...(entry.origin ? [el("small", { className: "quiet block" }, entry.origin)] : [])] },
  { title: "Action", value: (entry) => (entry.action.endsWith(".refused") ? stateMark("failed", entry.action) : entry.action) },
  { title: "Target", value: (entry) => entry.target || "–" },
  { title: "Change", value: difference },
];
async function addEntries(values) {
  const page = await api(AUDIT + query({ ...values, cursor }));
  const table = dataTable("Entries, the newest first", COLUMNS, page.entries),
    body = $("audit").querySelector("tbody");
  if (body) body.append(...table.querySelectorAll("tbody tr"));
  else if (page.entries.length) $("audit").replaceChildren(table);
  cursor = page.next_cursor;
  $("more").hidden = cursor === null;
  const count = $("audit").querySelectorAll("tbody tr").length;
  $("audit-note").textContent = count
    ? `${number(count)} ${count === 1 ? "entry" : "entries"}${Object.keys(values).length ? " with these filters" : ""}. The newest is first.`
    : cursor
      ? "No entry matches in the newest part of the log. Load more to search further back."
      : Object.keys(values).length
        ? "No entry matches these filters. Use * for any text, as in key.* or token *."
        : "The log has no entries.";
}
async function showAddress() {
  const values = address();
  for (const name of FILTERS) $("audit-filter").elements.namedItem(name).value = values[name] ?? "";
  cursor = null;
  $("audit").replaceChildren();
  try {
    await addEntries(values);
    $("verify").hidden = $("verify-elsewhere").hidden = false;
  } catch (error) {
    if (!(error instanceof ApiError) || error.status === 401) throw error;
    $("more").hidden = true;
    $("audit-note").textContent = "";
    const none = /no audit log/.test(error.message);
    $("audit").replaceChildren(
      el("p", { className: none ? "" : "error", role: "alert" }, capital(error.message)),
      ...(none
        ? [
            el("p", {}, "The log records each change with its author. Create a secret, add this to gateway.yaml, and restart:"),
            codeBlock("openssl rand -hex 32 > audit.secret\nchmod 600 audit.secret\n"),
            codeBlock("# gateway.yaml\naudit:\n  secret: {file: audit.secret}\n  file: audit.jsonl\n"),
          ]
        : []),
    );
  }
}
async function verify() {
  const button = $("verify-now"),
    show = (...content) => $("verified").replaceChildren(...content);
  button.disabled = true;
  show("Verifying the log…");
  try {
    const { entries, chains, moved_files: moved, broken } = await api(`${AUDIT}/verification`);
    const sum = `${plural(entries, "line")}${chains.length > 1 ? ` in ${plural(chains.length, "chain")}` : ""}${moved.length ? `, with ${plural(moved.length, "rotated file")}` : ""}`;
    show(
      broken
        ? stateMark("failed", `The chain is broken at ${broken.where}: ${broken.why}.`)
        : stateMark("up", `Chain intact: ${sum}. No line was changed or removed.`),
      el(
        "small",
        { className: "quiet block" },
        "Verified ",
        when(Date.now() / 1000),
        broken ? ". If rotated files are in another folder, or the secret was replaced, verify it with the command below." : ".",
      ),
    );
  } catch (error) {
    show(el("span", { className: "error" }, error instanceof ApiError ? `${capital(error.message)}.` : "The gateway does not respond."));
  } finally {
    button.disabled = false;
  }
}
function go(values) {
  history.pushState(null, "", `/console/audit${query(values)}`);
  return load(showAddress);
}
start(() => {
  const form = $("audit-filter");
  form.hidden = !may("admin");
  if (form.hidden) {
    $("audit-note").textContent = "The log shows who did what. This page needs the role admin.";
    return;
  }
  form.onsubmit = (event) => {
    event.preventDefault();
    go(Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, value.trim()])));
  };
  $("clear").onclick = () => go({});
  $("more").onclick = () => load(() => addEntries(address()));
  $("verify-now").onclick = verify;
  $("verify-elsewhere").replaceChildren(codeBlock("vllm-gateway audit verify"));
  window.onpopstate = () => load(showAddress);
  return showAddress();
});
