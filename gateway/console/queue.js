const QUEUE_EVERY = 5; // seconds
const MOST_MODELS = 12; // models that are shown with why their requests wait
const FIELDS = ["by", "model", "find", "show"];
const LEVELS = { key: ["key", "model", "team", "class"], team: ["team", "model"], class: ["class", "model"] };
const address = new URLSearchParams(location.search);
let flows = [],
  openSlots = [],
  models = [],
  shown = null;

const wait = (value) => (value === null ? null : value < 1 || value >= 60 ? duration(value) : `${amount(Math.round(10 * value) / 10)} s`);
const percent = (share) => `${(100 * share).toFixed(1)}%`;

// The flows of keys, added up by a level. A key without a team has a share beside those of the teams.
function grouped(by) {
  const found = new Map();
  for (const flow of flows) {
    const names = LEVELS[by].map((level) => flow[level]),
      alone = by === "team" && !flow.team ? flow.key : "",
      id = JSON.stringify([...names, alone]);
    if (!found.has(id))
      found.set(id, {
        alone,
        ...Object.fromEntries(LEVELS[by].map((level, at) => [level, names[at]])),
        waiting: 0,
        dispatched: 0,
        refused: 0,
        waited: 0,
        service: 0,
        share: 0,
      });
    const row = found.get(id);
    row.waiting += flow.waiting;
    row.dispatched += flow.dispatched;
    row.refused += flow.refused;
    row.waited += flow.wait_seconds * flow.dispatched;
    row.service += flow.service;
    row.share += flow.service_share;
  }
  return [...found.values()].map((row) => ({ ...row, wait: row.dispatched ? row.waited / row.dispatched : null }));
}

// Why requests of a model wait: the same two reasons as `queue_reason` in the access log.
function reasonOf(model) {
  const up = model.servers.filter((server) => server.state === "ready");
  if (!up.length) return [stateMark(model.state, "Loading"), " No server is up. The requests wait until one is."];
  const [inFlight, limit] = up
    .map((server) => server.load.split(" of ").map(Number))
    .reduce(([sum, most], [load, bound]) => [sum + load, most + (bound ?? NaN)], [0, 0]);
  const load = Number.isNaN(limit) ? number(inFlight) : `${number(inFlight)} of at most ${number(limit)}`;
  return [stateMark("starting", "Full"), ` ${plural(up.length, "server")} up, with ${load} requests in flight.`];
}
function waitingModel(model) {
  const shares = el("button", { type: "button", className: "plain", "aria-label": `Show shares of ${model.id}` }, "Show shares");
  shares.addEventListener("click", () => {
    showModels(model.id);
    choose("model", model.id);
    $("shares-title").scrollIntoView();
  });
  return el(
    "li",
    {},
    el("div", { className: "bar" }, el("h3", {}, model.id), el("strong", {}, `${number(model.queued)} waiting`)),
    el("p", {}, ...reasonOf(model)),
    model.waiting ? el("p", {}, `The longest waits for ${model.waiting}.`) : null,
    el(
      "div",
      { className: "row" },
      shares,
      el(
        "a",
        { href: `/console/models${query({ find: model.id })}`, className: "button plain", "aria-label": `Open the model ${model.id}` },
        "Open the model",
      ),
    ),
  );
}
function showWaiting() {
  const waiting = models.filter((model) => model.queued > 0).sort((one, other) => other.queued - one.queued),
    dispatched = flows.reduce((sum, flow) => sum + flow.dispatched, 0),
    waited = flows.reduce((sum, flow) => sum + flow.wait_seconds * flow.dispatched, 0);
  const figure = (title, value) => el("div", { className: "figure" }, el("dt", {}, title), el("dd", {}, el("strong", {}, value)));
  $("figures").replaceChildren(
    figure("Waiting now", number(waiting.reduce((sum, model) => sum + model.queued, 0))),
    figure("Models with a queue", `${number(waiting.length)} of ${number(models.length)}`),
    figure("Served after a wait", number(dispatched)),
    figure("Mean wait", dispatched ? wait(waited / dispatched) : "–"),
  );
  $("waiting-note").textContent = waiting.length
    ? waiting.length > MOST_MODELS
      ? `The ${MOST_MODELS} models with the most, of ${number(waiting.length)}.`
      : ""
    : "No requests wait. Requests wait while all servers of a model are full, or while it is being loaded.";
  $("waiting-note").hidden = !$("waiting-note").textContent;
  const key = JSON.stringify(waiting);
  if ($("waiting").drawn !== key) $("waiting").replaceChildren(...waiting.slice(0, MOST_MODELS).map(waitingModel));
  $("waiting").drawn = key;
}

// The slots that the classes after a class with reserved slots may use. They may follow its times, which are parts of its objectives.
const OBJECTIVES = { ttft: "time to the first token", itl: "time between tokens" };
function slotsOf({ model, class: name, slots, objectives }) {
  const times = Object.keys(OBJECTIVES)
    .filter((objective) => objective in objectives)
    .map((objective) => `${OBJECTIVES[objective]}: ${Math.round(100 * objectives[objective])}% of the objective`);
  return el(
    "li",
    {},
    el("div", { className: "bar" }, el("h3", {}, model), el("strong", {}, `${number(slots)} open`)),
    el("p", {}, `Open to the classes after ${name}, on each server.`),
    times.length ? el("p", {}, `${capital(times.join(", "))}.`) : null,
  );
}
function showSlots() {
  $("slots-section").hidden = !openSlots.length;
  const key = JSON.stringify(openSlots);
  if ($("slots").drawn !== key) $("slots").replaceChildren(...openSlots.slice(0, MOST_MODELS).map(slotsOf));
  $("slots").drawn = key;
}

// The table

const named = (level) => (row) => {
  const text = row[level];
  if (!text)
    return row.alone ? el("span", { title: row.alone }, keyLink(row.alone), el("small", { className: "quiet" }, " without a team")) : null;
  if (level === "model") return el("span", { title: text }, text);
  if (level === "class") return text;
  return el("span", { title: text }, (level === "key" ? keyLink : teamLink)(text));
};
const measured = (title, name, value, note = "") => ({ title, name, note, number: true, value, text: (row) => row[name] });
function columnsOf(levels) {
  const columns = [
    ...levels.map((level) => ({ title: capital(level), name: level, value: named(level), text: (row) => row[level] || row.alone })),
    {
      title: "Share",
      name: "share",
      note: "Part of the service of the model",
      value: (row) =>
        el(
          "div",
          { className: "share" },
          el("progress", { max: 1, value: row.share, "aria-hidden": "true" }),
          el("span", {}, percent(row.share)),
        ),
      text: (row) => row.share,
    },
    measured("Service", "service", (row) => number(row.service), "Weighted tokens since the gateway started"),
    measured("Waiting", "waiting", (row) => number(row.waiting), "Requests that wait now"),
    measured("Mean wait", "wait", (row) => wait(row.wait), "Of the requests that were served after a wait"),
    measured("Served", "dispatched", (row) => number(row.dispatched), "Requests that were served after a wait"),
    measured("Refused", "refused", (row) => number(row.refused), "Requests that found the queue full, waited too long, or would be late"),
  ];
  return columns.map((column) => {
    const head = el("button", { type: "button", className: "sort" }, column.title);
    head.addEventListener("click", () => sortBy(column));
    return { ...column, head };
  });
}
const WIDE = { model: 11.5, team: 7, class: 5 },
  FIRST = 10,
  MEASURES = [9, 6, 5.6, 7, 5.2, 5.6];
const COLLATOR = new Intl.Collator("en-US", { numeric: true });
function compared(one, other) {
  if (typeof one === "string") return COLLATOR.compare(one, other);
  return (one ?? -1) - (other ?? -1);
}
// Numbers start with the largest, names with the first.
const isName = (column) => LEVELS.key.includes(column.name);
function sorting(columns) {
  const [name, order] = (address.get("sort") ?? "").split("-"),
    column =
      columns.find((each) => each.name === name) ??
      columns.find((each) => each.name === "model") ??
      columns.find((each) => each.name === "share");
  return [column, ["ascending", "descending"].includes(order) ? order : isName(column) ? "ascending" : "descending"];
}
function sortBy(column) {
  const [before, order] = sorting(shown.columns);
  const first = isName(column) ? "ascending" : "descending";
  const turned = order === "ascending" ? "descending" : "ascending";
  choose("sort", `${column.name}-${before.name === column.name ? turned : first}`);
}
function showTable() {
  const by = $("by").value,
    text = $("find").value.trim().toLowerCase();
  // One model needs no column.
  const levels = LEVELS[by].filter((level) => level !== "model" || (!$("model").value && $("model").options.length > 2)),
    key = levels.join();
  if (shown?.key !== key) {
    const columns = columnsOf(levels);
    shown = {
      key,
      columns,
      ...longTable(`Shares by ${by}`, columns, [...levels.map((level, at) => (at ? WIDE[level] : FIRST)), ...MEASURES]),
    };
    $("flows").replaceChildren(shown.node);
  }
  const [column, order] = sorting(shown.columns),
    sign = order === "ascending" ? 1 : -1;
  for (const each of shown.columns) {
    if (each === column) each.head.parentNode.setAttribute("aria-sort", order);
    else each.head.parentNode.removeAttribute("aria-sort");
  }
  const rows = grouped(by).filter(
    (row) =>
      (!$("model").value || row.model === $("model").value) &&
      (!$("show").value || row.waiting > 0) &&
      (!text || [...LEVELS[by], "alone"].some((level) => row[level].toLowerCase().includes(text))),
  );
  rows.sort((one, other) => sign * compared(one[column.name], other[column.name]) || other.share - one.share);
  shown.node.hidden = $("csv").hidden = !rows.length; // before, because a hidden row has no height
  shown.replace(rows);
  $("shares-words").hidden = $("filters").hidden = !flows.length;
  const count = rows.length ? plural(rows.length, "row") : emptyText();
  if ($("count").textContent !== count) $("count").textContent = count;
}
function emptyText() {
  if (!flows.length) return "No request has waited since the gateway started.";
  if ($("show").value && !$("find").value.trim() && !$("model").value) return "No requests wait now.";
  return "Nothing matches these filters.";
}
function choose(name, value) {
  if (value) address.set(name, value);
  else address.delete(name);
  history.replaceState(null, "", location.pathname + query(Object.fromEntries(address)));
  showTable();
}
// The models of the filter: those with a queue, and the chosen one.
function showModels(value = address.get("model") ?? "") {
  const names = [...new Set([...flows.map((flow) => flow.model), ...(value ? [value] : [])])].sort(),
    key = JSON.stringify([names, value]);
  if ($("model").drawn === key) return;
  $("model").replaceChildren(el("option", { value: "" }, "all models"), ...names.map((name) => el("option", { value: name }, name)));
  $("model").value = value;
  $("model").drawn = key;
}

async function showQueue() {
  [{ flows, open_slots: openSlots }, { models }] = await Promise.all([api("/queue"), api("/admin/v1/models")]);
  $("queue-note").hidden = true;
  $("queue-parts").hidden = false;
  $("as-of").replaceChildren(...liveAt(Date.now() / 1000));
  showWaiting();
  showSlots();
  showModels();
  showTable();
}
start(() => {
  if (me.role === null) {
    $("queue-note").textContent = "This page needs the role viewer. Owners of teams do not see the queue.";
    return;
  }
  for (const name of FIELDS) {
    if (name !== "model" && address.get(name) !== null) $(name).value = address.get(name);
    $(name).oninput = () => choose(name, name === "by" && $(name).value === "key" ? "" : $(name).value);
  }
  if (!$("by").value) $("by").value = "key";
  if (!$("show").value) $("show").value = "";
  $("filters").onsubmit = (event) => event.preventDefault();
  $("csv").onclick = () => saveCsv(`queue-by-${$("by").value}.csv`, shown.columns, shown.rows);
  return refresh(QUEUE_EVERY, showQueue);
});
