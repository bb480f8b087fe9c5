"use strict";
// Everything that comes from the gateway or a person is inserted as text: no function here parses markup.
const KEY = document.body.dataset.secret;
const $ = (id) => document.getElementById(id);

// On a narrow screen the titles of the pages scroll sideways.
document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });

function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made && name !== "list") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

function request(path, options = {}) {
  const headers = new Headers(options.headers),
    key = sessionStorage.getItem(KEY);
  if (key) headers.set("authorization", `Bearer ${key}`);
  if (options.json !== undefined) {
    headers.set("content-type", "application/json");
    options.body = JSON.stringify(options.json);
  }
  return fetch(path, { cache: "no-store", credentials: "same-origin", ...options, headers });
}

async function checked(response) {
  if (response.ok) return response;
  const text = await response.text();
  let error = {};
  try {
    error = JSON.parse(text).error ?? {};
  } catch {
    error = { message: text.trim() || `The gateway responded with status ${response.status}.` };
  }
  // The data port sends an object, the admin port a sentence.
  if (typeof error === "string") error = { message: error };
  throw new ApiError(response.status, error.message ?? `The gateway responded with status ${response.status}.`, error.code);
}

// What went wrong, in words: without a response, the browser has no words for people.
const wordsOf = (error) =>
  error instanceof TypeError ? "The gateway does not respond, or the connection was lost. Try again." : error.message;
const api = async (path, options) => (await checked(await request(path, options))).json();

// The gateway that does not respond is asked again until it does: the page recovers without a reload.
let retry = 0;
function lost(again) {
  $("lost").textContent = "The gateway does not respond. This page tries again by itself.";
  $("lost").hidden = false;
  clearTimeout(retry);
  retry = setTimeout(again, 2000);
}
function found() {
  clearTimeout(retry);
  $("lost").hidden = true;
}

async function load(show) {
  try {
    await show();
    found();
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) enter(whyEnded(error));
    else if (error instanceof ApiError) {
      $("lost").textContent = error.message;
      $("lost").hidden = false;
    } else if (error instanceof TypeError && /fetch|network/i.test(error.message)) lost(() => load(show));
    else throw error;
  }
}

// Why the page cannot be shown any more. A page that was not shown yet needs no reason.
function whyEnded(error) {
  if (sessionStorage.getItem(KEY)) return error.message;
  return $("page").hidden ? "" : "Your session has ended. Sign in again.";
}

function enter(message) {
  sessionStorage.removeItem(KEY);
  $("page").hidden = $("leave").hidden = true;
  $("enter").hidden = false;
  $("enter-error").textContent = message;
  for (const link of $("enter").querySelectorAll("a[href^='/sign-in?']"))
    link.search = new URLSearchParams({ return_to: location.pathname + location.search });
  $("key").value = "";
  $("key").focus();
}

// A key in the fragment of the URL, which browsers do not send, is moved to the tab.
function takeFragment() {
  const fragment = new URLSearchParams(location.hash.slice(1)).get("key");
  if (!fragment) return;
  sessionStorage.setItem(KEY, fragment);
  history.replaceState(null, "", location.pathname + location.search);
}

// Open the page of a person with a key: `path` tells whether the gateway knows the key, and `show` gets its response. The page is entered again
// after its key or session has ended, so `show` is called more than once. Returns what enters again.
function enterWith(path, show) {
  takeFragment();
  const open = () =>
    load(async () => {
      const known = await api(path);
      $("enter").hidden = true;
      $("page").hidden = false;
      $("leave").hidden = !sessionStorage.getItem(KEY);
      await show(known);
    });
  $("enter-form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, $("key").value.trim());
    open();
  });
  $("leave").addEventListener("click", () => enter(""));
  for (const button of document.querySelectorAll("[data-close]")) button.addEventListener("click", () => button.closest("dialog").close());
  if (sessionStorage.getItem(KEY) || document.body.dataset.signsIn) open();
  else enter("");
  return open;
}

async function copy(text, button) {
  const before = button.textContent;
  let copied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Browsers have no clipboard for a page without TLS, except on this machine. They still copy a selection.
    const area = el("textarea", { className: "hidden", value: text });
    button.after(area);
    area.select();
    copied = document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.textContent = copied ? "Copied" : "Select the text and copy it";
  setTimeout(() => {
    button.textContent = before;
  }, 2000);
}

function codeBlock(text, shown = text) {
  const button = el("button", { type: "button", className: "plain copy" }, "Copy");
  button.addEventListener("click", () => copy(text, button));
  return el("div", { className: "code" }, button, el("pre", { tabIndex: 0 }, el("code", {}, shown)));
}

// Sentences of the gateway mark code with backticks.
const prose = (text) => text.split("`").map((part, at) => (at % 2 ? el("code", {}, part) : part));

// A list of [title, node]. One is shown at a time. Arrow keys move between the titles (WAI-ARIA, tabs pattern).
function tabs(parts, name) {
  const list = el("div", { role: "tablist", "aria-label": name }),
    panels = [];
  const select = (chosen, focus) =>
    parts.forEach((_, at) => {
      const is = at === chosen;
      list.children[at].setAttribute("aria-selected", String(is));
      list.children[at].tabIndex = is ? 0 : -1;
      panels[at].hidden = !is;
      if (is && focus) list.children[at].focus();
    });
  parts.forEach(([title, node], at) => {
    const id = `${name}-${at}`.replaceAll(/\W/g, "-");
    const tab = el("button", { type: "button", role: "tab", id, "aria-controls": `${id}-panel` }, title);
    tab.addEventListener("click", () => select(at, false));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) select((at + step + parts.length) % parts.length, true);
    });
    list.append(tab);
    panels.push(el("div", { role: "tabpanel", id: `${id}-panel`, "aria-labelledby": id }, node));
  });
  const made = el("div", { className: "tabs" }, list, ...panels);
  select(0, false);
  return made;
}

// A formatter is made once: making one costs more than a row of a table.
const WHOLE = new Intl.NumberFormat("en-US"),
  EXACT = new Intl.NumberFormat("en-US", { maximumFractionDigits: 4 });
const number = (value) => WHOLE.format(Number(value));
const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
function duration(seconds) {
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} hours` : `${Math.round(seconds / 86400)} days`;
}

const LIMIT_NAMES = {
  requests_per_minute: "requests per minute",
  tokens_per_minute: "tokens per minute",
  requests_per_day: "requests per day",
  tokens_per_day: "tokens per day",
  tokens_per_week: "tokens per week",
  tokens_per_month: "tokens per month",
  cost_per_day: "cost per day",
  cost_per_week: "cost per week",
  cost_per_month: "cost per month",
  concurrent: "requests at once",
  max_tokens: "tokens of a response",
};
const nameOf = (limit) => LIMIT_NAMES[limit] ?? limit.replaceAll("_", " ");
// The gateway knows no name of the currency: prices and limits are numbers.
const CURRENCY = "in the operator's currency";
const unitOf = (limit) => (limit.startsWith("cost") ? capital(CURRENCY) : "");
// The limits that are one number.
const AMOUNTS = [
  "requests_per_minute",
  "tokens_per_minute",
  "concurrent",
  "tokens_per_day",
  "tokens_per_week",
  "tokens_per_month",
  "cost_per_day",
  "cost_per_week",
  "cost_per_month",
  "max_tokens",
];
// A sentence starts with a capital letter, unless its first word is a name, such as that of a server.
const capital = (text) => (/^[a-z]+:?([\s,.]|$)/.test(text) ? text[0].toUpperCase() + text.slice(1) : text);
const amount = (value) => EXACT.format(value);
// An amount of a limit, in words.
const limited = (name, text) => (name.startsWith("cost") ? nameOf(name).replace("cost", `a cost of ${text}`) : `${text} ${nameOf(name)}`);
// Limits in one line.
const brief = (limits) => {
  const found = AMOUNTS.filter((name) => limits[name] !== undefined).map((name) => limited(name, amount(Number(limits[name]))));
  const others = Object.keys(limits).length - found.length;
  return [...found, ...(others ? [`${others} more`] : [])].join(", ") || "none";
};

// The events of a stream (WHATWG HTML, "Server-sent events"), parsed as JSON.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const data = part
        .split(/\r?\n/)
        .filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trimStart())
        .join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

const SVG = "http://www.w3.org/2000/svg";
function svg(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Times are shown in the reader's time zone; the title has the exact time in UTC.
function when(seconds) {
  if (seconds === null || seconds === undefined) return "never";
  const date = new Date(1000 * seconds);
  const shown = date.toLocaleString("en-US", {
    month: "short",
    day: "numeric",
    hour: "2-digit",
    minute: "2-digit",
    second: "2-digit",
    hour12: false,
  });
  return el("time", { dateTime: date.toISOString(), title: date.toISOString() }, shown);
}
// A state has a color and a word.
const stateMark = (name, text = name) => el("span", { className: `state ${name}` }, text);

// A table. A column is {title, head, value, number, text, note}: `head` replaces the title in the table, `note` explains it, `value` gives a
// cell's content for a row, and `text` its text in CSV if that differs.
// The first column names the row.
function tableRow(columns, row) {
  const cells = columns.map((column, at) => {
    const content = column.value(row) ?? "–";
    return el(
      at ? "td" : "th",
      { className: column.number ? "number" : "", ...(at ? {} : { scope: "row" }) },
      ...(Array.isArray(content) ? content : [content]),
    );
  });
  return el("tr", {}, ...cells);
}
function tableWith(label, columns, body) {
  const head = columns.map((column) =>
    el(
      "th",
      { scope: "col", className: column.number ? "number" : "", ...(column.note ? { title: column.note } : {}) },
      column.head ?? column.title,
    ),
  );
  return el(
    "div",
    { className: "scroll", tabIndex: 0, role: "region", "aria-label": label },
    el("table", {}, el("thead", {}, el("tr", {}, ...head)), body),
  );
}
const dataTable = (label, columns, rows) => tableWith(label, columns, el("tbody", {}, ...rows.map((row) => tableRow(columns, row))));

// A table of any length. It contains only the rows near the visible ones, each on one line, and calls `more` when its end comes near.
// Returns its node, `add`, which appends rows, and `replace`, which keeps the position and the rows that are the same. `wide` lists the columns' widths in rem.
function longTable(label, columns, wide, more = () => {}) {
  const rows = [],
    made = new Map(),
    [above, below] = [0, 1].map(() => el("tr", { "aria-hidden": "true" }, el("td", { className: "space", colSpan: columns.length })));
  const body = el("tbody", {}, above, below),
    node = tableWith(label, columns, body),
    table = node.querySelector("table");
  node.classList.add("long");
  table.style.minWidth = `${wide.reduce((sum, each) => sum + each)}rem`;
  node.querySelectorAll("thead th").forEach((head, at) => {
    head.style.width = `${wide[at]}rem`;
  });
  let tall = 40;
  const draw = () => {
    const top = node.scrollTop, // read before anything is changed, so that the browser lays out the table once
      seen = node.clientHeight || 800,
      first = Math.max(Math.floor(top / tall) - 8, 0),
      last = Math.min(first + Math.ceil(seen / tall) + 16, rows.length);
    for (const [at, row] of made)
      if (at < first || at >= last) {
        row.remove();
        made.delete(at);
      }
    let next = below;
    for (let at = last - 1; at >= first; at--) {
      if (!made.has(at)) {
        made.set(at, tableRow(columns, rows[at]));
        made.get(at).setAttribute("aria-rowindex", at + 2);
        next.before(made.get(at));
      }
      next = made.get(at);
    }
    above.firstChild.style.height = `${first * tall}px`;
    below.firstChild.style.height = `${(rows.length - last) * tall}px`;
    if (top + 2 * seen > rows.length * tall) more();
  };
  node.addEventListener("scroll", draw, { passive: true });
  const add = (found) => {
    rows.push(...found);
    table.setAttribute("aria-rowcount", rows.length + 1);
    draw();
    tall = made.values().next().value?.offsetHeight || tall;
  };
  const replace = (found) => {
    for (const [at, row] of made)
      if (JSON.stringify(rows[at]) !== JSON.stringify(found[at])) {
        row.remove();
        made.delete(at);
      }
    rows.length = 0;
    add(found);
  };
  return { node, add, replace, rows };
}

// Offer rows as a CSV file (RFC 4180). A cell that a spreadsheet would run as a formula is quoted with an apostrophe.
function saveCsv(name, columns, rows) {
  const cell = (value) => {
    const text = String(value ?? "");
    const safe = typeof value !== "number" && /^[=+@\t\r-]/.test(text) ? `'${text}` : text;
    return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  const lines = [columns.map((column) => column.title), ...rows.map((row) => columns.map((column) => (column.text ?? column.value)(row)))];
  const link = el("a", {
    href: URL.createObjectURL(new Blob([lines.map((line) => line.map(cell).join(",")).join("\r\n")], { type: "text/csv" })),
    download: name,
  });
  link.click();
  URL.revokeObjectURL(link.href);
}

function toast(text) {
  const shown = el("p", { className: "toast" }, text);
  $("toasts").append(shown);
  setTimeout(() => shown.remove(), 6000);
}

// Ask before an action, in words. `fields` are labeled inputs, `command` is the same action on a terminal, and `act` performs it and returns
// what was done, as a text or as a node that stays in the dialog, such as a key that is shown once.
function confirmAction({ title, words, button, danger = false, command = null, fields = [], act }) {
  const error = el("p", { className: "error", role: "alert" }),
    go = el("button", { className: danger ? "danger" : "primary" }, button),
    cancel = el("button", { type: "button" }, "Cancel");
  const note = el("div", { className: "as-command" });
  const showCommand = () =>
    command &&
    note.replaceChildren(
      el("p", { className: "quiet" }, "The same on the command line:"),
      codeBlock(typeof command === "function" ? command() : command),
    );
  const form = el("form", {}, ...(words ? [el("p", {}, words)] : []), ...fields, note, error, el("div", { className: "row" }, go, cancel));
  const dialog = el("dialog", { "aria-label": title }, el("div", { className: "bar" }, el("h2", {}, title)), form);
  showCommand();
  form.addEventListener("input", showCommand);
  cancel.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    error.textContent = "";
    go.disabled = true;
    try {
      const done = await act();
      if (done instanceof Node) {
        cancel.textContent = "Close";
        form.replaceChildren(done, el("div", { className: "row" }, cancel));
        cancel.focus();
        return;
      }
      dialog.close();
      if (done) toast(done);
    } catch (problem) {
      error.textContent =
        problem instanceof TypeError ? "The gateway does not respond. Nothing is known about the action." : problem.message;
    } finally {
      go.disabled = false;
    }
  });
  // Enter confirms what does no harm.
  if (!fields.length) (danger ? cancel : go).autofocus = true;
  document.body.append(dialog);
  dialog.showModal();
}
const field = (label, input, help = "") =>
  el("label", { className: "field" }, el("span", {}, label), input, help ? el("small", { className: "quiet" }, help) : null);

// Show each event of a stream of the gateway. A stream that ends, or is silent because the network is lost, is requested again. While
// `paused()` is true, events are not shown. A later call replaces this one.
const MOST_SILENT = 30000;
let following = 0;
async function follow(path, show, paused = () => false) {
  const own = ++following;
  while (own === following) {
    const connection = new AbortController();
    let silence = 0;
    const listen = () => {
      clearTimeout(silence);
      silence = setTimeout(() => connection.abort(), MOST_SILENT);
    };
    try {
      listen();
      const response = await checked(await request(path, { headers: { accept: "text/event-stream" }, signal: connection.signal }));
      found();
      for await (const event of events(response)) {
        if (own !== following) return;
        listen();
        if (!paused()) show(event);
      }
    } catch (error) {
      if (own !== following) return;
      if (error instanceof ApiError && error.status === 401) return enter(whyEnded(error));
      if (error instanceof ApiError) $("lost").textContent = error.message;
      else $("lost").textContent = "The gateway does not respond. This page tries again by itself.";
      $("lost").hidden = false;
    } finally {
      clearTimeout(silence);
    }
    await new Promise((done) => setTimeout(done, 2000));
  }
}
// Call `show` now and every `seconds`, while the page is visible and open. The page recovers by itself. A later call replaces this one: a page
// that was entered again must not refresh twice.
let refreshing = null;
function refresh(seconds, show) {
  const again = async () => {
    if (refreshing !== again) return;
    if (!document.hidden && !$("page").hidden) await load(show);
    setTimeout(again, 1000 * seconds);
  };
  refreshing = again;
  setTimeout(again, 1000 * seconds);
  return show();
}
