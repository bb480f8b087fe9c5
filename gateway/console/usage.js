const FIELDS = { by: "by", days: "days", label: "label", team: "team", key: "key-filter", model: "model" };
const filters = () => Object.fromEntries(Object.entries(FIELDS).map(([name, id]) => [name, $(id).value.trim()]));
const partName = () => new URLSearchParams(location.search).get("part") ?? "usage";
function range(days) {
  const now = new Date(),
    month = (back) => new Date(Date.UTC(now.getUTCFullYear(), now.getUTCMonth() - back, 1)).toISOString().slice(0, 10);
  if (days === "month") return { since: month(0) };
  if (days === "last") return { since: month(1), until: month(0) };
  return { since: new Date(Date.now() - 86400000 * (Number(days) - 1)).toISOString().slice(0, 10) };
}
const sum = (rows, name) => rows.reduce((total, row) => total + Number(row[name] ?? 0), 0);
const tokens = (row) => row.prompt_tokens + row.completion_tokens;
const figure = (title, value, note = "") =>
  el(
    "div",
    { className: "figure" },
    el("dt", {}, title),
    el("dd", {}, el("strong", {}, value), note ? el("small", { className: "quiet" }, note) : ""),
  );
const percent = (part, whole) => (whole ? `${amount(Math.round((1000 * part) / whole) / 10)}%` : "0%");

// Usage and cost

const NOTHING = { team: "no team", key: "no key", user: "no user named", model: "no model", day: "–" };
const LINKS = { team: "/console/teams", key: "/console/keys" };
function nameCell(by, value) {
  if (value === null || value === "") return el("span", { className: "quiet" }, NOTHING[by] ?? "not labeled");
  return by in LINKS ? link(`${LINKS[by]}${query({ id: value })}`, value) : value;
}
const measure = (title, value, note = "") => ({
  title,
  note,
  number: true,
  value: (row) => (value(row) === null ? null : amount(Number(value(row)))),
  text: value,
});
function usageColumns(by, all) {
  const name = by.startsWith("label:") ? by.slice(6) : by;
  return [
    { title: capital(name), value: (row) => el("span", { title: row[by] ?? "" }, nameCell(by, row[by])), text: (row) => row[by] },
    {
      title: "Share",
      note: "Of the tokens of all rows",
      value: (row) =>
        el(
          "div",
          { className: "share" },
          el("progress", { max: all || 1, value: tokens(row), "aria-hidden": "true" }),
          el("span", {}, percent(tokens(row), all)),
        ),
      text: null,
    },
    measure("Requests", (row) => row.requests),
    measure("Prompt tokens", (row) => row.prompt_tokens),
    measure("Cached tokens", (row) => row.cached_tokens),
    measure("Completion tokens", (row) => row.completion_tokens),
    measure("Cost", (row) => row.cost, capital(CURRENCY)),
  ];
}

async function showUsage() {
  const { by: chosen, days, label, ...named } = filters(),
    by = chosen === "label" ? `label:${label || "cost_center"}` : chosen;
  $("label-field").hidden = chosen !== "label";
  const asked = { ...range(days), ...named };
  const daily = await api(`/usage${query({ by: "day", ...asked })}`),
    report = by === "day" ? daily : await api(`/usage${query({ by, ...asked })}`);
  const rows = report.usage,
    all = daily.usage;
  if (!rows.length) return el("p", { className: "quiet" }, "No requests in this period, with these filters.");
  const priced = all.some((row) => row.cost !== null),
    estimated = sum(all, "estimated");
  const figures = el(
    "dl",
    { className: "figures-row" },
    figure("Cost", priced ? amount(sum(all, "cost")) : "–", priced ? CURRENCY : "No model has a price."),
    figure("Requests", number(sum(all, "requests")), `${percent(sum(all, "incomplete"), sum(all, "requests"))} incomplete`),
    figure("Prompt tokens", number(sum(all, "prompt_tokens")), `${percent(sum(all, "cached_tokens"), sum(all, "prompt_tokens"))} cached`),
    figure(
      "Completion tokens",
      number(sum(all, "completion_tokens")),
      `${percent(estimated, sum(all, "requests"))} of the requests estimated`,
    ),
  );
  const columns = usageColumns(
    by,
    rows.reduce((total, row) => total + tokens(row), 0),
  );
  const table = longTable(`Usage by ${by}`, columns, [10.6, 9.4, 6.6, 8.8, 9.2, 11, 6.3]);
  const csv = el("button", { type: "button" }, "Download CSV");
  csv.addEventListener("click", () =>
    saveCsv(
      `usage-by-${chosen}-${asked.since}.csv`,
      columns.filter((column) => column.text !== null),
      rows,
    ),
  );
  const title = el("div", { className: "bar" }, el("h2", {}, `By ${by.startsWith("label:") ? `the label ${by.slice(6)}` : by}`), csv);
  const note = report.truncated ? el("p", { className: "error" }, "Only the 50,000 groups with the most tokens are listed.") : null;
  const days_ = everyDay(all, asked.since).filter((row) => !asked.until || row.day < asked.until);
  queueMicrotask(() => table.add(rows));
  return [figures, days === "1" ? "" : chart(days_, "day"), el("section", {}, title, ...(note ? [note] : []), table.node)];
}

// Reconciliation, in words. Each class has its explanation.

const CLASSES = {
  mirrored: "copies of requests that a mirror sent; they are not billed",
  continued: "continued streams: what lost servers have counted, and the second prefill, less the tokens that others made; not billed",
  choices: "the prompt again, for each further choice of a request (n); the ledger counts it once",
  not_delivered: "generated, but the client had disconnected; not billed",
  cancelled_prefill: "prompts computed for requests that were cancelled before their first event; not billed",
  direct_use: "requests that bypassed the gateway; not billed",
  lost: "requests whose worker process died; recorded as lost",
  uncounted: "complete responses for which the server reports no count",
  estimates: "tokens that the ledger estimated beyond the server's count",
  difference: "not explained by any of these",
};
function verdict(rows) {
  const engine = sum(rows, "engine"),
    ledger = sum(rows, "ledger"),
    unexplained = rows.reduce((total, row) => total + Math.abs(row.difference), 0);
  if (engine === ledger && !unexplained) return ["up", "The engines and the ledger have the same tokens."];
  const apart = `The engines have counted ${number(Math.abs(engine - ledger))} tokens ${engine >= ledger ? "more" : "fewer"} than the ledger (${percent(Math.abs(engine - ledger), engine)}).`;
  return unexplained
    ? ["failed", `${apart} ${number(unexplained)} of them are not explained: a server has lost counts, or clocks differ.`]
    : ["up", `${apart} All of them are explained below.`];
}

async function showReconciliation() {
  const { days, model } = filters();
  const { servers } = await api(`/usage${query({ reconcile: "true", ...range(days), model })}`);
  if (!servers.length)
    return el(
      "p",
      { className: "quiet" },
      "No server's token counters were sampled in this period. The gateway samples servers that are up, every 15 seconds by default.",
    );
  const lines = servers.flatMap((each) => ["prompt", "completion"].map((kind) => ({ ...each, kind, ...each[kind] })));
  const [state, text] = verdict(lines);
  const kinds = ["prompt", "completion"].map((kind) => lines.filter((line) => line.kind === kind));
  const total = (name) => kinds.map((rows) => ({ title: name, number: sum(rows, name) }));
  const explained = Object.keys(CLASSES).filter((name) => sum(lines, name) || name === "difference" || lines.some((line) => line[name]));
  const table = [
    ["The engines counted", "engine", "in the token counters of the servers"],
    ["The ledger has", "ledger", "recorded for responses, and billed"],
    ...explained.map((name) => [capital(name.replaceAll("_", " ")), name, CLASSES[name]]),
  ].map(([title, name, meaning]) => ({ title, meaning, prompt: total(name)[0].number, completion: total(name)[1].number }));
  const summary = dataTable(
    "The reconciliation of all servers",
    [
      { title: "Tokens", value: (row) => row.title },
      { title: "Prompt", number: true, value: (row) => number(row.prompt) },
      { title: "Completion", number: true, value: (row) => number(row.completion) },
      { title: "Meaning", value: (row) => row.meaning },
    ],
    table,
  );
  const columns = [
    { title: "Server", value: (row) => row.server },
    { title: "Model", value: (row) => row.model },
    { title: "Tokens", value: (row) => row.kind },
    { title: "From", value: (row) => when(row.since), text: (row) => new Date(1000 * row.since).toISOString() },
    { title: "To", value: (row) => when(row.until), text: (row) => new Date(1000 * row.until).toISOString() },
    ...["engine", "ledger", ...explained].map((name) => ({
      title: capital(name.replaceAll("_", " ")),
      number: true,
      value: (row) => number(row[name]),
      text: (row) => row[name],
    })),
  ];
  const csv = el("button", { type: "button" }, "Download CSV");
  csv.addEventListener("click", () => saveCsv("reconciliation.csv", columns, lines));
  const notes = servers.flatMap((each) => [
    ...(each.prompt_in_progress || each.completion_in_progress
      ? [
          `${each.server}: requests with ${number(each.prompt_in_progress + each.completion_in_progress)} tokens were in flight when the counters were read. Each number may be wrong by them.`,
        ]
      : []),
    ...(each.prompt_unsampled || each.completion_unsampled
      ? [
          `${each.server}: ${number(each.prompt_unsampled + each.completion_unsampled)} tokens of the ledger are outside of the sampled time, so no counter confirms them.`,
        ]
      : []),
  ]);
  return [
    el("p", { className: "verdict" }, stateMark(state, text)),
    el(
      "p",
      { className: "quiet" },
      "Each server counts its tokens. This page compares the counts with the ledger, and explains each difference.",
    ),
    summary,
    el(
      "section",
      {},
      el("div", { className: "bar" }, el("h2", {}, "By server"), csv),
      dataTable("The reconciliation by server", columns, lines),
    ),
    ...(notes.length ? [el("ul", { className: "quiet" }, ...notes.map((each) => el("li", {}, each)))] : []),
  ];
}

// Closed months

async function showMonths() {
  const { months } = await api("/admin/v1/months");
  const last = range("last").since.slice(0, 7),
    close = el("button", { type: "button", className: "primary" }, "Close a month");
  close.addEventListener("click", () => closeMonth(months.some((each) => each.month === last) ? "" : last));
  const columns = [
    {
      title: "Month",
      value: (row) => {
        const open = el("button", { type: "button", className: "plain" }, row.month);
        open.addEventListener("click", () => load(() => openMonth(row.month)));
        return open;
      },
    },
    { title: "Closed", value: (row) => when(Date.parse(row.closed) / 1000) },
    { title: "Hash of the report", value: (row) => el("code", { title: row.hash }, `${row.hash.slice(0, 16)}…`) },
  ];
  const list = months.length
    ? dataTable("Closed months", columns, months.toReversed())
    : el("p", { className: "quiet" }, "No month is closed yet. You can close a month after its last day.");
  const given = new URLSearchParams(location.search).get("month");
  if (given) queueMicrotask(() => load(() => openMonth(given)));
  return [
    el(
      "div",
      { className: "bar" },
      el(
        "p",
        { className: "quiet" },
        "A closed month is a report that never changes, for finance. Usage that is stored later is listed as corrections.",
      ),
      may("admin") ? close : "",
    ),
    list,
  ];
}

const counted = (lines) => `${number(lines)} ${lines === 1 ? "line" : "lines"}`;
const COST_CENTER = "cost_center";
const monthColumns = [
  { title: "Team", value: (row) => row.team || "no team", text: (row) => row.team },
  { title: "Key", value: (row) => oneLine(row.key ?? "–"), text: (row) => row.key },
  { title: "Model", value: (row) => oneLine(row.model ?? "–"), text: (row) => row.model },
  { title: "Cost center", value: (row) => oneLine(row.labels?.[COST_CENTER] ?? "–"), text: (row) => row.labels?.[COST_CENTER] },
  ...["requests", "prompt_tokens", "completion_tokens"].map((name) => ({
    title: capital(name.replaceAll("_", " ")),
    number: true,
    value: (row) => number(row[name] ?? 0),
    text: (row) => row[name],
  })),
  { title: "Cost", number: true, note: capital(CURRENCY), value: (row) => row.cost ?? "–", text: (row) => row.cost },
  { title: "Arrived later", value: (row) => date(row.late), text: (row) => row.late },
];

async function openMonth(month) {
  const found = await api(`/admin/v1/months/${encodeURIComponent(month)}`),
    parse = (lines) => lines.map((line) => JSON.parse(line)),
    rows = parse(found.lines),
    late = parse(found.corrections);
  history.replaceState(null, "", `/console/usage${query({ part: "months", month })}`);
  $("month-title").textContent = `Report of ${month}`;
  const csv = el("button", { type: "button" }, "Download CSV");
  csv.addEventListener("click", () => saveCsv(`${month}.csv`, monthColumns, [...rows, ...late]));
  const shown = (label, list) => {
    if (!list.length) return el("p", { className: "quiet" }, label);
    const table = longTable(label, monthColumns, [9, 13, 14, 9, 7, 9, 11, 9, 12]);
    queueMicrotask(() => table.add(list)); // when the dialog is open
    return table.node;
  };
  $("month").replaceChildren(
    stateMark(
      found.intact ? "up" : "failed",
      found.intact
        ? "The report has not changed since it was closed: its lines have this hash."
        : "The report was changed in the database: its lines do not have this hash.",
    ),
    codeBlock(found.hash),
    el(
      "p",
      {},
      "Closed on ",
      when(Date.parse(found.closed) / 1000),
      `, with ${counted(rows.length)} and a cost of ${amount(sum(rows, "cost"))} ${CURRENCY}.`,
    ),
    el("p", { className: "row" }, csv),
    shown(rows.length ? "Lines of the report" : "No requests in this month.", rows),
    el("h3", {}, "Corrections"),
    shown(late.length ? "Corrections" : "No row has arrived since.", late),
  );
  if (!$("month-dialog").open) $("month-dialog").showModal();
}

function closeMonth(month) {
  const input = el("input", {
    value: month,
    required: true,
    pattern: "\\d{4}-\\d{2}",
    placeholder: "2026-10",
    title: "A month such as 2026-10",
  });
  confirmAction({
    title: "Close a month",
    words:
      "The report of the month is frozen. This cannot be undone. Usage that is stored later becomes a correction. If gateways were off, wait a few days after the end of the month.",
    button: "Close the month",
    danger: true,
    fields: [field("Month", input)],
    command: () => `vllm-gateway usage close ${shellText(input.value || "2026-10")}`,
    act: async () => {
      const found = await post(`/admin/v1/months/${encodeURIComponent(input.value.trim())}/close`);
      await show();
      return `${found.month} is closed, with ${counted(found.lines.length)}.`;
    },
  });
}

const PARTS = { usage: showUsage, reconciliation: showReconciliation, months: showMonths };
let shows = 0;
async function show() {
  const name = partName() in PARTS ? partName() : "usage",
    mine = ++shows;
  const holder = el("div", {});
  await part(holder, PARTS[name]);
  if (mine === shows) $("usage").replaceChildren(...holder.childNodes);
}

start(async () => {
  const given = new URLSearchParams(location.search),
    name = partName();
  for (const [field_, id] of Object.entries(FIELDS)) if (given.get(field_)) $(id).value = given.get(field_);
  if (given.get("by")?.startsWith("label:")) [$("by").value, $("label").value] = ["label", given.get("by").slice(6)];
  for (const each of $("parts").children)
    if (each.search === (name === "usage" ? "" : `?part=${name}`)) each.setAttribute("aria-current", "page");
  $("filters").hidden = name === "months";
  for (const each of document.querySelectorAll(".of-usage"))
    each.hidden = name !== "usage" || (each.id === "label-field" && $("by").value !== "label");
  $("month-dialog").onclose = () => history.replaceState(null, "", `/console/usage${query({ part: "months" })}`);
  onFilter(200, () => {
    const values = name === "usage" ? filters() : { days: $("days").value, model: $("model").value, part: name };
    history.replaceState(null, "", location.pathname + query(values));
    return show();
  });
  await show();
});
