// The shared part of the pages of keys and teams: entries with their versions, and forms for limits that show the effect of a change.
const option = (name) => `--${name.replaceAll("_", "-")}`;
const words = (text) => text.split(/[\s,]+/).filter(Boolean);
const link = (path, text, className = "") => el("a", { href: path, className }, text);

const DATE = new Intl.DateTimeFormat("en-US", { year: "numeric", month: "short", day: "numeric" });
const date = (text) => (text ? el("time", { dateTime: text, title: text }, DATE.format(new Date(text))) : null);
// A text on one line, which is whole in its title.
const oneLine = (text) => el("span", { title: text }, text);
const ago = (text) =>
  text ? el("time", { dateTime: text, title: text }, `${duration(Math.max((Date.now() - Date.parse(text)) / 1000, 1))} ago`) : null;

// What is used of a limit, as a bar with its numbers, and with its name if the column does not say it.
function usedBar(limit, named = false) {
  const share = limit.used / limit.amount,
    used = `${amount(limit.used)} of ${amount(limit.amount)}`;
  return [
    el("progress", {
      className: share >= 1 ? "full" : share >= 0.8 ? "near" : "",
      max: 1,
      value: Math.min(share, 1),
      "aria-label": `${Math.round(100 * share)}% used`,
    }),
    el(
      "small",
      { className: share >= 1 ? "error" : "quiet" },
      (share >= 1 ? "Full: " : "") + (named === true ? limited(limit.limit, used) : used),
    ),
  ];
}
const day = (text) => (text ? when(Date.parse(text) / 1000) : null);
const keyLink = (id, text = id) => link(`/console/keys${query({ id })}`, text);
const teamLink = (id) => (id ? link(`/console/teams${query({ id })}`, id) : null);
// Facts as a card of columns. A value is a text, a node, or a list of these.
const factsCard = (facts) =>
  el(
    "dl",
    { className: "card facts columns" },
    ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, ...[value].flat()))),
  );

// An entry of the store, with the ETag that names its version.
async function readEntry(path) {
  const response = await checked(await request(path));
  return { ...(await response.json()), tag: response.headers.get("etag") };
}
// Read one entry, and make it the title of the page. If it does not exist, show the text and return null.
async function openEntry(read, kind, missing) {
  try {
    const entry = await read();
    $("one-title").textContent = entry.id;
    document.title = `${entry.id} · ${kind}`;
    return entry;
  } catch (error) {
    if (error.status !== 404) throw error;
    showMissing(missing);
    return null;
  }
}
// Change a version of an entry. `again` shows the new state if it was changed meanwhile.
async function changeEntry(path, method, tag, again, json, headers = {}) {
  try {
    const body = json === undefined ? {} : { json };
    return await checked(await request(path, { method, headers: { "if-match": tag, ...headers }, ...body }));
  } catch (error) {
    if (error.status !== 412) throw error;
    await again();
    throw new Error("It was changed meanwhile, so nothing was done. Close this dialog to see the new state, and try again.");
  }
}
const onceKey = () => [...crypto.getRandomValues(new Uint8Array(12))].map((each) => each.toString(16).padStart(2, "0")).join("");

// Fill a part of the page. A refusal of the gateway is shown at its place.
async function part(node, make) {
  try {
    node.replaceChildren(...[await make()].flat());
  } catch (error) {
    if (!(error instanceof ApiError) || error.status === 401) throw error;
    node.replaceChildren(
      el("p", { className: error.status === 404 || error.status === 403 ? "quiet" : "error" }, ...prose(`${capital(error.message)}.`)),
    );
  }
}

// A button that acts on the entry of the page.
function actionButton(text, act, className = "") {
  const made = el("button", { type: "button", className }, text);
  made.addEventListener("click", () => load(async () => act()));
  return made;
}
// Say that the entry of the page does not exist.
function showMissing(text) {
  for (const section of document.querySelectorAll("#one section")) section.hidden = true;
  $("one-about").replaceChildren(el("p", {}, text));
}
// Say that entries cannot be created here, and how to change that.
function showNoStore(text) {
  $("create").hidden = true;
  $("no-store").hidden = false;
  $("no-store").replaceChildren(el("p", {}, text), codeBlock("ledger: sqlite:///usage.db\nstore: ledger"));
}
// A long table of what a route lists in pages, and its count in words. `fetchRows(cursor)` returns rows and the next cursor, which is null
// at the end. A page of a search may be empty although more follow. `nouns` are the names of one and of several rows, and `empty()` is said
// without any. A later table replaces this one, and then nothing is shown any more.
let newest = null;
function pagedTable(label, columns, wide, { first = "", fetchRows, nouns, empty }) {
  const table = longTable(label, columns, wide, () => load(next)),
    isNewest = () => newest === table;
  let cursor = first,
    loading = false;
  newest = table;
  const count = () => {
    const { length } = table.rows,
      isOpen = cursor !== null;
    table.node.hidden = !length;
    $("count").textContent =
      length || isOpen ? `${number(length)}${isOpen ? " or more" : ""} ${nouns[length === 1 && !isOpen ? 0 : 1]}` : empty();
  };
  async function next() {
    if (cursor === null || loading) return;
    loading = true;
    try {
      let rows;
      do [rows, cursor] = await fetchRows(cursor);
      while (cursor !== null && !rows.length && isNewest());
      if (isNewest()) table.add(rows);
    } finally {
      loading = false;
    }
    if (isNewest()) count();
  }
  // Rows that are known before the first page do not load it.
  const show = async (node, before = []) => {
    loading = true;
    table.add(before);
    loading = false;
    await next();
    if (!isNewest()) return;
    node.replaceChildren(table.node);
    count();
    table.add([]);
  };
  return { table, isNewest, show };
}
// Read a page of the store. Without a store, its list is empty, and `text` says how to add one.
async function storePage(path, text) {
  try {
    return await api(path);
  } catch (error) {
    if (error.status !== 404) throw error;
    showNoStore(text);
    return null;
  }
}
// Call `show` when the filters have not changed for `delay` milliseconds.
function onFilter(delay, show) {
  let waiting = 0;
  $("filters").oninput = () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => load(show), delay);
  };
  $("filters").onsubmit = (event) => event.preventDefault();
}

const PERIODS = { day: "today", week: "this week", month: "this month", minute: "in the last minute" };
const period = (name) => PERIODS[name.split("_").at(-1)] ?? "in its window";

// Say what a changed limit does now. `state` is what is used of it, null if that is unknown.
function effect(name, before, after, state) {
  const title = capital(nameOf(name));
  if (after === null) return `${title}: no limit any more.`;
  if (name === "max_tokens") return `${title}: a request for more than ${amount(after)} is refused.`;
  if (!state || state.used === null)
    return before === undefined ? `${title}: ${amount(after)} from now on.` : `${title}: ${amount(after)} instead of ${amount(before)}.`;
  const used = name === "concurrent" ? `${amount(state.used)} are in flight` : `${amount(state.used)} used ${period(name)}`;
  const until = state.reset_seconds > 0 && !name.endsWith("minute") ? `, for ${duration(state.reset_seconds)}` : "";
  if (state.used >= after) return `${title}: ${used}. With ${amount(after)}, new requests are refused at once${until}.`;
  return `${title}: ${used}. With ${amount(after)}, ${amount(after - state.used)} are left (${Math.round((100 * state.used) / after)}% used).`;
}

// Inputs for limits. `patch()` returns what is changed, null for a limit that is removed, and undefined without a change. Throws an error for
// an invalid input. `states` are of /limits.
function limitsForm(limits, states = [], legend = "Limits") {
  const inputs = AMOUNTS.map((name) =>
    el("input", {
      inputMode: "decimal",
      autocomplete: "off",
      value: limits[name] === undefined ? "" : String(limits[name]),
      placeholder: "no limit",
    }),
  );
  const rest = Object.fromEntries(Object.entries(limits).filter(([name]) => !AMOUNTS.includes(name)));
  const before = Object.keys(rest).length ? JSON.stringify(rest, null, 2) : "";
  const more = el("textarea", {
    rows: 5,
    value: before,
    spellcheck: false,
    className: "mono",
    placeholder: '{"budgets": [{"window": "7d", "tokens": 1000000}]}',
  });
  const preview = el("ul", { className: "effects", "aria-live": "polite" });
  const changes = () => {
    const found = {};
    AMOUNTS.forEach((name, at) => {
      const text = inputs[at].value.replaceAll(/[,_\s]/g, "");
      if (text && !(Number(text) >= 0)) throw new Error(`${capital(nameOf(name))}: expected a number.`);
      const value = text ? Number(text) : null;
      if (value !== (limits[name] === undefined ? null : Number(limits[name]))) found[name] = value;
    });
    if (more.value.trim() !== before) {
      let other;
      try {
        other = JSON.parse(more.value.trim() || "{}");
      } catch {
        throw new Error("Other limits: this is not valid JSON.");
      }
      for (const name of Object.keys(rest)) if (!(name in other)) found[name] = null;
      Object.assign(found, other);
    }
    return found;
  };
  const patch = () => {
    const found = changes();
    return Object.keys(found).length ? found : undefined;
  };
  const show = () => {
    try {
      const lines = Object.entries(changes())
        .filter(([name]) => AMOUNTS.includes(name))
        .map(([name, after]) => {
          const state = states.find((each) => each.limit === name && each.models === null && !each.soft);
          const text = effect(name, limits[name], after, state);
          return el("li", { className: text.includes("refused at once") ? "error" : "" }, text);
        });
      preview.replaceChildren(...lines);
    } catch (error) {
      preview.replaceChildren(el("li", { className: "error" }, error.message));
    }
  };
  const node = el(
    "fieldset",
    {},
    el("legend", {}, legend),
    el("div", { className: "amounts" }, ...AMOUNTS.map((name, at) => field(capital(nameOf(name)), inputs[at], unitOf(name)))),
    el(
      "details",
      {},
      el("summary", {}, "Other limits, as JSON"),
      field("Rolling and soft budgets, sessions, single models, end users", more),
    ),
    preview,
  );
  node.addEventListener("input", show);
  // The same changes as options of a command.
  const options = () => {
    const lines = [],
      unset = [];
    try {
      for (const [name, value] of Object.entries(changes()))
        if (value === null) unset.push(`--unset ${name.replaceAll("_", "-")}`);
        else if (AMOUNTS.includes(name)) lines.push(`${option(name)} ${value}`);
    } catch {
      return "";
    }
    return [...lines, ...unset].map((each) => ` ${each}`).join("");
  };
  return { node, patch, options };
}

// Raise a limit of a key or team until a time. `kind` is keys or teams.
function raiseLimit(kind, id, states, again) {
  const own = states.filter(
    (each) => each.holder === `${kind.slice(0, -1)} ${id}` && each.models === null && !each.soft && each.limit !== "session",
  );
  if (!own.length) return toast("There is no limit to raise.");
  const closest = own.reduce((one, other) => ((other.used ?? 0) / other.amount > (one.used ?? 0) / one.amount ? other : one));
  const limit = el(
    "select",
    {},
    ...own.map((each) => el("option", { value: each.limit, selected: each === closest }, capital(nameOf(each.limit)))),
  );
  const to = el("input", { value: "2x", required: true }),
    until = el("input", { value: "2h", required: true }),
    preview = el("p", { className: "quiet", "aria-live": "polite" });
  const show = () => {
    const found = own.find((each) => each.limit === limit.value),
      now = found.configured ?? found.amount,
      raised = to.value.endsWith("x") ? now * Number(to.value.slice(0, -1)) : Number(to.value);
    preview.textContent = Number.isFinite(raised)
      ? `${capital(nameOf(found.limit))}: ${amount(raised)} instead of ${amount(now)}${found.used === null ? "" : `; ${amount(found.used)} are used, so ${amount(Math.max(raised - found.used, 0))} are left`}. After that, the limit is ${amount(now)} again.`
      : "";
  };
  for (const input of [limit, to, until]) input.addEventListener("input", show);
  show();
  confirmAction({
    title: `Raise a limit of ${id}`,
    button: "Raise the limit",
    fields: [
      field("Limit", limit),
      field("To", to, "A factor such as 2x, or an amount."),
      field("Until", until, "A duration such as 2h, a time of day in UTC such as 18:00, or 2027-01-31T18:00:00Z."),
      preview,
    ],
    command: () => `vllm-gateway ${kind} raise ${shellText(id)} ${limit.value} ${to.value} --until ${until.value}`,
    act: async () => {
      await post(`/admin/v1/${kind}/${encodeURIComponent(id)}/raises`, { limit: limit.value, to: to.value, until: until.value });
      await again();
      return `${capital(nameOf(limit.value))} of ${id} is raised.`;
    },
  });
}

// The raises in force of a key or team, with a button that ends each.
function raisesList(kind, id, raises, again) {
  if (!raises.length) return el("p", { className: "quiet" }, "No limit is raised at the moment.");
  return el(
    "ul",
    { className: "lines" },
    ...raises.map((each) => {
      const end = el("button", { type: "button", "aria-label": `End the raise of ${nameOf(each.limit)}` }, "End");
      end.addEventListener("click", () =>
        confirmAction({
          title: `End the raise of ${nameOf(each.limit)}`,
          words: `The configured limit of ${id} applies again at once.`,
          button: "End the raise",
          command: `vllm-gateway ${kind} end-raise ${shellText(id)} --limit ${each.limit}`,
          act: async () => {
            await api(`/admin/v1/${kind}/${encodeURIComponent(id)}/raises${query({ limit: each.limit })}`, { method: "DELETE" });
            await again();
            return `The raise of ${nameOf(each.limit)} has ended.`;
          },
        }),
      );
      const to = typeof each.to === "number" ? amount(each.to) : each.to;
      return el(
        "li",
        { className: "bar" },
        el("span", {}, `${capital(nameOf(each.limit))} to ${to} until `, when(Date.parse(each.until) / 1000), `, by ${each.by}`),
        may("operator") ? end : null,
      );
    }),
  );
}

// The limits of /limits as bars.
const limitBars = (states, none) =>
  states.length ? el("ul", { className: "limits" }, ...states.map(limitBar)) : el("p", { className: "quiet" }, none);

// The usage of the last 30 days as a chart.
async function monthChart(values, none) {
  const since = new Date(Date.now() - 29 * 86400000).toISOString().slice(0, 10),
    { usage } = await api(`/usage${query({ by: "day", since, ...values })}`);
  if (!usage.length) return el("p", { className: "quiet" }, none);
  const sum = (name) => usage.reduce((total, row) => total + Number(row[name] ?? 0), 0);
  const cost = usage.some((row) => row.cost !== null) ? `, at a cost of ${amount(sum("cost"))} ${CURRENCY}` : "";
  const text = `${number(sum("requests"))} requests with ${number(sum("prompt_tokens") + sum("completion_tokens"))} tokens${cost}.`;
  return [el("p", {}, text), chart(everyDay(usage, since), "day")];
}
