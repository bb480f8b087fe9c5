const FILTERS = ["id", "key", "team", "user", "model", "status", "code", "reason", "since", "until"];
const REQUESTS = "/admin/v1/requests";
const address = () => Object.fromEntries([...new URLSearchParams(location.search)].filter(([name]) => FILTERS.includes(name)));
const toAddress = (values) => `/console/requests${query(values)}`;
function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1000) return `${amount(Number((value / 1000).toPrecision(3)))} s`;
  return `${value < 10 ? Math.round(10 * value) / 10 : Math.round(value)} ms`;
}

// Open an address of this page without loading it again.
function go(values) {
  history.pushState(null, "", toAddress(values));
  return load(showAddress);
}
function inPage(text, values, more = {}) {
  const link = el("a", { href: toAddress(values), ...more }, text);
  link.addEventListener("click", (event) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey) return;
    event.preventDefault();
    go(values);
  });
  return link;
}
// The outcomes of requests, with their words, colors and filters. The gateway has the same definition of errors and rejected ones.
const OUTCOMES = [
  { filter: "errors", name: "Error", color: "failed", is: (one) => one.status >= 500 || ["upstream", "drain"].includes(one.incomplete) },
  { filter: null, name: "Lost", color: "failed", is: (one) => one.status === null },
  { filter: null, name: "Disconnected", color: "stopped", is: (one) => one.status === 499 || one.incomplete !== null },
  { filter: "rejected", name: "Rejected", color: "degraded", is: (one) => one.status >= 400 },
  { filter: null, name: "Succeeded", color: "up", is: () => true },
];
const outcomeOf = (one) => OUTCOMES.find((outcome) => outcome.is(one));
function resultCell(one) {
  const { name, color } = outcomeOf(one),
    details = [one.status, one.code ?? one.incomplete, / continued\b/.test(one.continuations ?? "") && "continued"]
      .filter(Boolean)
      .join(" ");
  return [stateMark(color, name), el("small", { className: "quiet block" }, details)];
}
const UNREAD = "The request was rejected before the gateway had read a model from its body.";
const modelOf = (one) =>
  one.model ?? one.requested_model ?? (one.code === null ? "–" : el("span", { className: "quiet", title: UNREAD }, "not read"));
const sender = (one) => (one.key === null ? `no valid key (${one.client ?? "unknown address"})` : one.key);
const tokensOf = (one) =>
  one.prompt_tokens === null && one.completion_tokens === null
    ? "–"
    : `${number(one.prompt_tokens ?? 0)} + ${number(one.completion_tokens ?? 0)}`;

const COLUMNS = [
  {
    title: "Request",
    value: (one) => [
      inPage(one.id, { ...address(), id: one.id }, { className: "mono" }),
      el("small", { className: "quiet block" }, when(Date.parse(one.time) / 1000)),
    ],
  },
  { title: "Result", value: resultCell },
  {
    title: "Key",
    value: (one) => [sender(one), ...[one.team, one.user].filter(Boolean).map((text) => el("small", { className: "quiet block" }, text))],
  },
  {
    title: "Model",
    value: (one) => [modelOf(one), ...(one.server ? [el("small", { className: "quiet block" }, one.server)] : [])],
  },
  { title: "Tokens", number: true, value: tokensOf },
  { title: "Took", number: true, value: (one) => milliseconds(one.total_ms) },
];
const MEANINGS = {
  errors: " with an error: a status of 5xx, or a response that was cut off by the server or the gateway",
  rejected: " that the gateway or a server rejected with a status of 4xx",
};
let cursor = null;
async function showList(values) {
  document.title = "Requests · vllm-gateway";
  $("requests-note").textContent = "Loading the requests.";
  const page = await api(REQUESTS + query(values));
  $("requests").replaceChildren(...(page.requests.length ? [dataTable("Requests, the newest first", COLUMNS, page.requests)] : []));
  cursor = page.next_cursor;
  $("more").hidden = cursor === null;
  const filtered = Object.keys(values).length > 0,
    length = page.requests.length;
  $("requests-note").textContent = length
    ? `${number(length)}${cursor === null ? "" : " or more"} ${length === 1 ? "request" : "requests"}${MEANINGS[values.status] ?? ""}. The newest is first. Tokens are those of the prompt plus those of the response.`
    : filtered
      ? "No request matches these filters. To search more than the last 7 days, fill in Since. A request appears about a second after its end."
      : "No requests in the last 7 days. A request appears about a second after its end.";
}
async function loadMore() {
  $("more").disabled = true;
  try {
    const page = await api(REQUESTS + query({ ...address(), cursor }));
    $("requests")
      .querySelector("tbody")
      .append(...dataTable("", COLUMNS, page.requests).querySelectorAll("tbody tr"));
    cursor = page.next_cursor;
    $("more").hidden = cursor === null;
  } finally {
    $("more").disabled = false;
  }
}

// The time line: what took how long, as far as it is known.
function phases(one) {
  const end = one.total_ms;
  if (end === null || end <= 0) return [];
  const queued = Math.min(one.queued_ms ?? 0, end),
    first = Math.max(Math.min(one.first_token_ms ?? end, end), queued);
  const before = one.server === null ? "in the gateway" : one.first_token_ms === null ? "on the server" : "until the first token";
  return [
    ["queue", "in the queue", 0, queued],
    [one.server === null ? "gateway" : "server", before, queued, first],
    ["tokens", "tokens", first, end],
  ].filter(([, , from, to]) => to > from);
}
function timeLine(one) {
  const parts = phases(one);
  if (!parts.length) return null;
  const total = one.total_ms,
    box = el("div", { className: "time-line" });
  const words = parts.map(([, text, from, to]) => `${milliseconds(to - from)} ${text}`);
  const drawIn = (width) => {
    const at = (value) => (value / total) * (width - 2) + 1;
    const drawn = svg("svg", { width, height: 58, role: "img", "aria-label": `${milliseconds(total)}: ${words.join(", ")}` });
    for (const [name, text, from, to] of parts) {
      const wide = Math.max(at(to) - at(from), 2);
      drawn.append(
        svg(
          "rect",
          { x: at(from), y: 6, width: wide, height: 26, rx: 4, class: name },
          svg("title", {}, `${milliseconds(to - from)} ${text}`),
        ),
      );
      if (wide > 8 * (milliseconds(to - from).length + 2))
        drawn.append(svg("text", { x: at(from) + 8, y: 24, class: `in ${name}` }, milliseconds(to - from)));
    }
    drawn.append(
      svg("text", { x: 1, y: 52 }, "received"),
      svg("text", { x: width - 1, y: 52, "text-anchor": "end" }, `ended after ${milliseconds(total)}`),
    );
    return drawn;
  };
  const legend = parts.map(([name], at) => el("span", { className: "key" }, el("span", { className: `swatch ${name}` }), words[at]));
  let last = 0;
  new ResizeObserver(() => {
    if (box.firstChild.clientWidth !== last) box.firstChild.replaceChildren(drawIn((last = box.firstChild.clientWidth)));
  }).observe(box);
  box.append(el("div", {}), el("p", { className: "legend" }, ...legend));
  return box;
}

const pairs = (entries) =>
  entries
    .filter(([, value]) => value !== null && value !== undefined && value !== "")
    .flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);
const OF_KEY = { errors: "Errors of this key", rejected: "Rejected requests of this key" };
const unread = (one) =>
  `not read. ${one.limit_holder ? "This limit is checked before the body is read, and the body names the model." : UNREAD}`;
function requestFacts(one, trace) {
  const key = one.key === null ? null : el("a", { href: `/console/keys?id=${encodeURIComponent(one.key)}` }, one.key);
  return pairs([
    ["Received", when(Date.parse(one.time) / 1000)],
    ["Route", `${one.endpoint}${one.stream ? ", streamed" : ""}`],
    ["Key", key ?? sender(one)],
    ["Team", one.team && el("a", { href: `/console/teams?id=${encodeURIComponent(one.team)}` }, one.team)],
    ["User", one.user],
    ["Requested model", one.requested_model],
    [one.server ? "Served by model" : "Model", one.model],
    ["Model", one.code !== null && one.model === null && one.requested_model === null ? unread(one) : null],
    ["Server", one.server],
    ["Attempts", one.retries ? `${one.retries + 1}` : null],
    ["Failed servers", one.failures],
    ["Limit", one.limit_holder && `${one.reason} of ${one.limit_holder}`],
    ["Field", one.param],
    ["Trace", trace && el("a", { href: trace, target: "_blank", rel: "noopener noreferrer" }, "Open the trace")],
  ]);
}
// A body of a record: JSON with line breaks, other text as it is. A long one is cut, because the browser must stay responsive.
const MOST = 200000;
function recordedText({ text, base64 }) {
  if (text === undefined) return `base64: ${base64}`;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
function recordedBody(title, text) {
  const rest = text.length > MOST ? el("p", { className: "quiet" }, `Cut after ${number(MOST)} of ${number(text.length)} characters.`) : "";
  return [el("h3", {}, title), codeBlock(text.slice(0, MOST)), rest];
}
function recordedParts(record) {
  const { events } = record.response,
    received = events ? events.map((each) => `+${milliseconds(1000 * each.at)}  ${recordedText(each).trim()}`).join("\n") : null;
  return [
    ...recordedBody("Request", recordedText(record.request)),
    ...(record.sent ? recordedBody("Request as the server got it", recordedText(record.sent)) : []),
    ...recordedBody(events ? "Response, each event with its time" : "Response", received ?? recordedText(record.response)),
    record.redacted ? el("p", { className: "quiet" }, "Fields of record.redact were removed before the record was stored.") : "",
  ];
}
function recorded(one) {
  const error = el("p", { className: "error", role: "alert" }),
    button = el("button", { type: "button", id: "show-record" }, "Show the recorded request and response"),
    box = el(
      "div",
      {},
      button,
      el("p", { className: "quiet" }, "They contain what people wrote. The audit log records that you view them."),
      error,
    );
  button.addEventListener("click", () =>
    load(async () => {
      error.textContent = "";
      try {
        box.replaceChildren(...recordedParts(await api(`${REQUESTS}/${encodeURIComponent(one.id)}/record`)));
      } catch (problem) {
        if (!(problem instanceof ApiError) || problem.status === 401) throw problem;
        error.textContent = `${capital(problem.message)}.`;
      }
    }),
  );
  return box;
}
function commands(one, records) {
  const shown = [["Show this request", `vllm-gateway requests ${shellText(one.id)}`]],
    { filter } = outcomeOf(one);
  if (one.key !== null && filter) shown.push([OF_KEY[filter], `vllm-gateway requests --key ${shellText(one.key)} --status ${filter}`]);
  if (records)
    shown.push(
      ["Show its bodies", `vllm-gateway record show ${shellText(one.id)}`],
      ["Send it again to another model", `vllm-gateway replay ${shellText(one.id)} --model OTHER`],
    );
  const note = records
    ? "Only admins see recorded bodies. Requests outside of the recorded share have none."
    : "Bodies are not recorded. With record in gateway.yaml, admins see them here, and a command sends a request again to another model.";
  return [...shown.flatMap(([title, text]) => [el("h3", {}, title), codeBlock(text)]), el("p", { className: "quiet" }, note)];
}
async function showRequest(identity) {
  document.title = `${identity} · vllm-gateway`;
  const { request: one, outcome, causes, time_line, facts, records, trace_url } = await api(`${REQUESTS}/${encodeURIComponent(identity)}`);
  const { id, ...rest } = address();
  const { filter, color } = outcomeOf(one),
    start = Date.parse(one.time);
  const copyId = el("button", { type: "button", className: "plain" }, "Copy the ID");
  copyId.addEventListener("click", () => copy(one.id, copyId));
  const likes = [
    one.key !== null && ["Requests of this key", { key: one.key }],
    one.key !== null && filter && [OF_KEY[filter], { key: one.key, status: filter }],
    one.code !== null && ["Requests with this code", { code: one.code }],
    one.model !== null && ["Requests of this model", { model: one.model }],
  ].filter(Boolean);
  $("request").replaceChildren(
    el("p", {}, inPage("← All requests", rest)),
    el("div", { className: "bar" }, el("h2", { className: "mono request-id" }, one.id), copyId),
    el("p", { className: "outcome" }, stateMark(color, capital(outcome))),
    causes.length ? el("div", { className: "cause bad" }, ...causes.map((text) => el("p", {}, capital(text)))) : "",
    timeLine(one) ?? "",
    el(
      "div",
      { className: "two" },
      el(
        "section",
        {},
        el("h3", {}, "What happened"),
        el(
          "ol",
          { className: "happened" },
          ...time_line.map(({ time, text }) =>
            el("li", {}, el("span", { className: "at" }, `+${milliseconds(Date.parse(time) - start)}`), el("span", {}, text)),
          ),
        ),
        ...facts.map((text) => el("p", { className: "quiet" }, capital(text))),
      ),
      el("section", {}, el("h3", {}, "Request"), el("dl", { className: "facts" }, ...requestFacts(one, trace_url))),
    ),
    el("p", { className: "row" }, ...likes.map(([text, values]) => inPage(text, values, { className: "button" }))),
    records && may("admin") ? el("section", {}, el("h3", {}, "Bodies"), recorded(one)) : "",
    el("details", {}, el("summary", {}, "Commands"), ...commands(one, records)),
  );
}

async function showAddress() {
  const values = address();
  for (const name of FILTERS) $("requests-filter").elements.namedItem(name).value = values[name] ?? "";
  $("requests-filter").hidden = Boolean(values.id);
  $("request").hidden = !values.id;
  $("requests-list").hidden = Boolean(values.id);
  try {
    await (values.id ? showRequest(values.id) : showList(values));
  } catch (error) {
    if (!(error instanceof ApiError) || error.status === 401) throw error;
    // The gateway's words at their place: an unknown ID, an invalid filter, no ledger.
    const words = el("p", { className: "error", role: "alert" }, capital(error.message));
    const help = /no ledger/.test(error.message)
      ? el(
          "p",
          {},
          "The ledger stores a row for each request. Add it to gateway.yaml and restart the gateway. Later requests are listed here.",
        )
      : null;
    if (values.id && !help)
      return $("request").replaceChildren(
        el("p", {}, inPage("← All requests", {})),
        words,
        el(
          "p",
          { className: "quiet" },
          "A request appears about a second after its end. Requests without a valid key are forgotten after a while.",
        ),
      );
    $("request").hidden = true;
    $("requests-filter").hidden = $("requests-list").hidden = false;
    $("more").hidden = true;
    $("requests-note").textContent = "";
    $("requests").replaceChildren(words, ...(help ? [help, codeBlock("# gateway.yaml\nledger: sqlite:///usage.db\n")] : []));
  }
}
start(() => {
  const form = $("requests-filter");
  form.hidden = me.role === null;
  if (form.hidden) {
    $("requests-note").textContent = "This page needs the role viewer. Owners of teams do not see single requests.";
    return;
  }
  const sent = () => Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, value.trim()]));
  form.onsubmit = (event) => {
    event.preventDefault();
    go(sent());
  };
  $("clear").onclick = () => go({});
  for (const button of form.querySelectorAll("[data-status]"))
    button.onclick = () => go({ ...sent(), id: "", status: button.dataset.status });
  $("more").onclick = () => load(loadMore);
  window.onpopstate = () => load(showAddress);
  return showAddress();
});
