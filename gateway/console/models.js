const MODELS_EVERY = 2; // seconds
const WORDS = {
  start: ["Start", "Starts", "The start has begun."],
  wake: ["Wake", "Wakes", "The start has begun."],
  stop: ["Stop", "Stops", "It is stopped."],
  restart: ["Restart", "Replaces", "The restart has begun."],
  cordon: ["Take out of rotation", "", "It gets no new requests."],
  uncordon: ["Return to rotation", "", "It gets requests again."],
};
const several = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
const chosen = new URLSearchParams(location.search);
let seen = { models: [] };

// See docs/continuation.md: the model's `resume` decides which streams can be continued.
const MOVES = "Streams that can be continued move to another server after the time in move_after.";

function consequences(model, operation) {
  const servers = several(model.servers.length, "server"),
    open = model.in_flight + model.adapters.reduce((sum, one) => sum + one.in_flight, 0);
  const drains = open
    ? `${several(open, "request")} in flight may finish first, for as long as the drain timeout permits.`
    : "No request is in flight.";
  if (operation === "stop")
    return `${WORDS.stop[1]} ${servers} of ${model.id}. ${drains} Until it is started again, its requests are refused or served by a fallback.`;
  if (operation === "restart") {
    const meanwhile =
      model.servers.length === 1
        ? "New requests wait in the queue until the server is ready."
        : `${MOVES} One server at a time is restarted; the others serve meanwhile.`;
    return `${WORDS.restart[1]} ${servers} of ${model.id}. ${drains} ${meanwhile}`;
  }
  return `${WORDS[operation][1]} ${servers} of ${model.id}. Requests that arrive meanwhile wait in the queue.`;
}

function act(name, operation, words, path) {
  const [title, , done] = WORDS[operation];
  confirmAction({
    title: title.includes(" ") ? title.replace(" ", ` ${name} `) : `${title} ${name}`, // "Take NAME out of rotation"
    words,
    button: title,
    danger: operation === "stop",
    command: `vllm-gateway ${operation} ${shellText(name)}`,
    act: async () => {
      await post(`${path}/${operation}`);
      await load(showModels);
      return `${name}: ${done}`;
    },
  });
}
function actionButton(text, key, perform) {
  const button = el("button", { type: "button", "data-act": key, "aria-label": key }, text);
  button.addEventListener("click", perform);
  return button;
}
function modelActions(model) {
  if (!may("operator")) return [];
  return model.operations.map((operation) =>
    actionButton(WORDS[operation][0], `${WORDS[operation][0]} ${model.id}`, () =>
      act(model.id, operation, consequences(model, operation), `/models/${encodeURIComponent(model.id)}`),
    ),
  );
}
function serverAction(model, server) {
  if (!may("operator") || !(server.is_cordoned || ["ready", "starting"].includes(server.state))) return [];
  const operation = server.is_cordoned ? "uncordon" : "cordon",
    others = model.servers.filter((one) => one !== server && one.state === "ready").length;
  const rest = others
    ? `${MOVES} ${several(others, "other server")} of ${model.id} can serve.`
    : `No other server of ${model.id} is ready, so its requests wait or fail.`;
  const words =
    operation === "cordon"
      ? `${server.name} gets no new requests, and keeps running. What it has in flight (${server.load}) may finish there. ${rest}`
      : `${server.name} gets new requests again.`;
  return [
    actionButton(WORDS[operation][0], `${WORDS[operation][0]}: ${server.name}`, () =>
      act(server.name, operation, words, `/servers/${encodeURIComponent(server.name)}`),
    ),
  ];
}

const fact = (name, value, more = "") => el("div", {}, el("dt", {}, name), el("dd", {}, value, more ? el("small", {}, more) : null));
const queueLink = (model) =>
  el(
    "a",
    { href: `/console/queue${query({ model: model.id })}`, "data-act": `Queue of ${model.id}`, title: `Queue of ${model.id}` },
    number(model.queued),
  );
// Streams that lost their server since the gateway started.
function continued({ continued: moved = 0, failed = 0, different = 0 }) {
  const lost = failed + different;
  return moved + lost ? [fact("Streams continued", number(moved), lost && `${number(lost)} could not be`)] : [];
}
function modelHead(model) {
  const [out, prompt] = model.speed === "-" ? ["0", ""] : model.speed.replace(/ out|in$/g, "").split(", ");
  return [
    el(
      "div",
      { className: "bar" },
      el(
        "div",
        {},
        el("h2", {}, model.id),
        model.aliases.length ? el("p", { className: "quiet" }, `also ${model.aliases.join(", ")}`) : null,
      ),
      el("div", { className: "row" }, ...modelActions(model)),
    ),
    el(
      "dl",
      { className: "numbers" },
      fact("State", stateMark(model.state), model.since && `for ${model.since}`),
      fact("In flight", number(model.in_flight)),
      fact("Queued", queueLink(model), model.waiting && `longest ${model.waiting}`),
      fact("Completion tokens/s", out, prompt && `prompt ${prompt.trim()}`),
      ...continued(model.continuations),
    ),
  ];
}
// The cause of a failure comes first, then what to change.
function serverTop(model, server) {
  const [inFlight, limit] = server.load.split(" of ").map(Number),
    isOut = server.is_cordoned && server.state === "stopped"; // it runs
  const parts = [
    el(
      "div",
      { className: "server-line" },
      el("h3", {}, server.name),
      el(
        "span",
        {},
        stateMark(server.state, isOut ? "out of rotation" : server.state),
        server.since ? el("span", { className: "quiet" }, ` for ${server.since}`) : null,
      ),
      el(
        "span",
        { className: "load" },
        `${server.load} in flight`,
        limit ? el("progress", { max: limit, value: inFlight, "aria-hidden": "true", className: inFlight >= limit ? "full" : "" }) : null,
      ),
      el("span", { className: server.restarts ? "" : "quiet" }, server.restarts || "no restarts"),
      el("span", { className: "row" }, ...serverAction(model, server)),
    ),
  ];
  if (server.reason || server.hint)
    parts.push(
      el(
        "div",
        { className: server.state === "failed" ? "cause bad" : "cause" },
        server.reason ? el("p", {}, ...prose(server.reason)) : null,
        server.hint ? el("p", {}, el("strong", {}, "What to do: "), ...prose(server.hint)) : null,
      ),
    );
  if (server.progress) {
    if (server.percent !== null) parts.push(el("progress", { max: 100, value: server.percent, "aria-label": `start of ${server.name}` }));
    parts.push(el("p", { className: "quiet mono" }, server.progress));
  }
  const notes = [...server.routing.map(capital), server.last_failure && capital(server.last_failure)].filter(Boolean);
  return [...parts, ...notes.map((note) => el("p", { className: "quiet" }, note))];
}
function choiceOf(model) {
  if (model.choice === null)
    return model.servers.length > 1
      ? el(
          "p",
          { className: "quiet" },
          "To see why a server gets a request, use ",
          el("code", {}, "balance: cost"),
          " with ",
          el("code", {}, "cost_policy: {explain: true}"),
          ".",
        )
      : null;
  const { request_id, ago, server, predicted_cached_tokens, candidates } = model.choice;
  const lowest = Math.min(...candidates.map(([, cost]) => cost));
  const columns = [
    { title: "Server", value: ([name]) => (name === server ? `${name} (chosen)` : name) },
    { title: "Predicted cost", number: true, value: ([, cost]) => `${amount(cost)} ms${cost === lowest ? ", the lowest" : ""}` },
    { title: "Cached tokens", number: true, value: ([, , cached]) => number(cached) },
  ];
  return el(
    "details",
    { className: "choice", "data-open": "choice" },
    el("summary", {}, `Why ${server} got the last request, ${ago} ago`),
    el(
      "p",
      { className: "quiet" },
      "The request ",
      el("a", { href: `/console/requests?id=${encodeURIComponent(request_id)}` }, request_id),
      ` was predicted to find ${number(predicted_cached_tokens)} tokens of its prompt in the cache. The server with the lowest cost is chosen: the time for the rest of the prompt, and for what waits before it.`,
    ),
    dataTable(`Candidates of ${model.id}`, columns, candidates),
  );
}
function modelFoot(model) {
  const adapters = model.adapters.length
    ? el(
        "p",
        {},
        el("strong", {}, "Adapters: "),
        model.adapters
          .map((one) => `${one.id} (${one.in_flight} in flight, ${one.speed === "-" ? "no" : one.speed} tokens per second)`)
          .join(", "),
      )
    : null;
  return [adapters, choiceOf(model)].filter(Boolean);
}

// A part is drawn again only if its data changed, so that opened sections, positions in logs and the focus stay.
function draw(node, data, make) {
  const text = JSON.stringify(data);
  if (node.drawn === text) return;
  node.drawn = text;
  const focused = node.contains(document.activeElement) ? document.activeElement.dataset.act : null,
    opened = [...node.querySelectorAll("details[open]")].map((one) => one.dataset.open);
  node.replaceChildren(...make());
  for (const one of node.querySelectorAll("details")) one.open = opened.includes(one.dataset.open);
  if (focused) [...node.querySelectorAll("[data-act]")].find((one) => one.dataset.act === focused)?.focus();
}
// Keep one node for each entry, by name and in their order.
function keyed(parent, entries, name, make, update) {
  const known = new Map([...parent.children].map((one) => [one.dataset.name, one]));
  entries.forEach((entry, at) => {
    const node = known.get(name(entry)) ?? make(entry);
    known.delete(name(entry));
    node.dataset.name = name(entry);
    if (parent.children[at] !== node) parent.insertBefore(node, parent.children[at] ?? null);
    update(node, entry);
  });
  for (const node of known.values()) node.remove();
}
function newServer(server) {
  const pre = el("pre", { className: "log", tabIndex: 0, role: "log", "aria-live": "off", "aria-label": `log of ${server.name}` });
  const details = el("details", {}, el("summary", {}, "End of the log"), el("p", { className: "quiet mono" }), pre);
  details.addEventListener("toggle", () => (pre.scrollTop = pre.scrollHeight));
  return el("section", { className: "server" }, el("div", {}), details);
}
function updateServer(model, node, server) {
  const [top, details] = node.children,
    pre = details.lastChild,
    isNew = node.state === undefined;
  const { lines, log, ...rest } = server;
  draw(top, [rest, model.servers.map((one) => one.state), me.role], () => serverTop(model, server));
  details.hidden = !log;
  details.children[1].textContent = log;
  // The log of a server that fails opens by itself, once.
  if (server.state === "failed" && node.state !== "failed") details.open = true;
  node.state = server.state;
  const text = lines.join("\n") || "The log is empty.";
  if (pre.textContent === text) return;
  const atEnd = isNew || pre.scrollHeight - pre.clientHeight - pre.scrollTop < 8;
  pre.textContent = text;
  if (atEnd) pre.scrollTop = pre.scrollHeight;
}
const newModel = () =>
  el("article", { className: "card model" }, el("div", {}), el("div", { className: "servers" }), el("div", { className: "foot" }));
function updateModel(node, model) {
  const [head, servers, foot] = node.children,
    { id, aliases, state, since, in_flight, queued, waiting, speed, operations, adapters, choice, continuations } = model;
  node.dataset.state = state;
  node.setAttribute("aria-label", id);
  const shown = [id, aliases, state, since, in_flight, queued, waiting, speed, operations, continuations, model.servers.length];
  draw(head, shown, () => modelHead(model));
  keyed(
    servers,
    model.servers,
    (server) => server.name,
    newServer,
    (each, server) => updateServer(model, each, server),
  );
  draw(foot, [adapters, choice, model.servers.length > 1], () => modelFoot(model));
}

const isFound = (model, text) =>
  [model.id, ...model.aliases, ...model.adapters.map((one) => one.id), ...model.servers.map((one) => one.name)].some((name) =>
    name.toLowerCase().includes(text.toLowerCase()),
  );
function showFiltered() {
  const state = chosen.get("state") ?? "",
    text = chosen.get("find") ?? "";
  const models = seen.models.filter((model) => (!state || model.state === state) && isFound(model, text));
  const counts = new Map([["", seen.models.length]]);
  for (const model of seen.models) counts.set(model.state, (counts.get(model.state) ?? 0) + 1);
  if (state && !counts.has(state)) counts.set(state, 0);
  draw($("states"), [[...counts], state], () =>
    [...counts].map(([name, count]) => {
      const button = el(
        "button",
        { type: "button", "aria-pressed": String(name === state), "data-act": name || "all" },
        name ? stateMark(name) : "All",
        el("span", { className: "count" }, number(count)),
      );
      button.addEventListener("click", () => choose("state", name));
      return button;
    }),
  );
  $("models-note").textContent = models.length
    ? ""
    : seen.models.length
      ? "No model matches these filters."
      : "There are no models yet. Add one to models in gateway.yaml.";
  $("models-note").hidden = models.length > 0;
  keyed($("models"), models, (model) => model.id, newModel, updateModel);
}
function choose(name, value) {
  if (value) chosen.set(name, value);
  else chosen.delete(name);
  history.replaceState(null, "", location.pathname + query(Object.fromEntries(chosen)));
  showFiltered();
}
async function showModels() {
  seen = await api("/admin/v1/models");
  $("models-facts").textContent = seen.facts.slice(0, 2).join(" · ");
  showFiltered();
  $("splits-section").hidden = !seen.splits.length;
  draw($("splits"), seen.splits, () => seen.splits.map((text) => el("li", {}, text)));
}
start(() => {
  $("find").value = chosen.get("find") ?? "";
  $("find").oninput = () => choose("find", $("find").value);
  $("models-filter").onsubmit = (event) => event.preventDefault();
  $("models-filter").hidden = me.role === null;
  if (me.role === null) {
    $("models-note").textContent = "This page needs the role viewer. Owners of teams do not see models and servers.";
    return;
  }
  return refresh(MODELS_EVERY, showModels);
});
