const PARAMETERS = [
  ["temperature", "Temperature", 0, 2, 0.1, "default"],
  ["top_p", "Top p", 0, 1, 0.05, "default"],
  ["max_tokens", "Max tokens", 1, 1000000, 1, "default"],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1, "0"],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.1, "0"],
  ["seed", "Seed", 0, 2147483647, 1, "random"],
];
const TOOL = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Get the weather of a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];
const SCHEMA = {
  type: "object",
  properties: { city: { type: "string" }, population: { type: "integer" } },
  required: ["city", "population"],
};
let columns = [],
  image = null,
  prices = new Map();

function json(id, name) {
  const text = $(id).value.trim();
  if (!text) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SyntaxError(`${name}: ${error.message}`);
  }
}

// The body of a request with the settings of the form. Raises SyntaxError for a field that is not JSON.
function bodyOf(model, messages) {
  const system = $("system").value.trim(),
    tools = json("tools", "Tools"),
    schema = json("schema", "JSON schema");
  const numbers = PARAMETERS.map(([name]) => [name, $(`parameter-${name}`).value])
    .filter(([, value]) => value !== "")
    .map(([name, value]) => [name, Number(value)]);
  return {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true },
    ...Object.fromEntries(numbers),
    ...(tools ? { tools } : {}),
    ...(schema ? { response_format: { type: "json_schema", json_schema: { name: "response", schema } } } : {}),
  };
}

// The same, or null after the problem is shown.
function validBody(model, messages) {
  $("settings-error").textContent = "";
  try {
    return bodyOf(model, messages);
  } catch (error) {
    $("settings-error").textContent = error.message;
    return null;
  }
}

// A conversation with one model. Its messages are those of the API.
class Column {
  constructor(model) {
    this.messages = [];
    this.model = model;
    this.abort = null;
    this.log = el("div", { className: "log", role: "log", "aria-label": `Conversation with ${model}` });
    this.title = el("h2", {}, model);
    this.node = el("section", { className: "column" }, this.title, this.log);
    this.show();
  }

  show() {
    const empty = el("p", { className: "empty" }, "Write a message to start.");
    this.log.replaceChildren(...(this.messages.length ? this.messages.map((message, at) => this.bubble(message, at)) : [empty]));
  }

  bubble(message, at) {
    if (message.role === "user") return this.asked(message, at);
    if (message.role === "tool")
      return el("div", { className: "message tool" }, el("p", { className: "who" }, "Result of a tool"), el("pre", {}, message.content));
    return el(
      "div",
      { className: "message answer" },
      el("p", { className: "who" }, this.model),
      ...this.parts(message),
      message.waits ? null : this.actions(at),
    );
  }

  asked(message, at) {
    const text = typeof message.content === "string" ? message.content : (message.content.find((part) => part.type === "text")?.text ?? "");
    const picture = Array.isArray(message.content) ? message.content.find((part) => part.type === "image_url") : null;
    const edit = el("button", { type: "button", className: "plain" }, "Edit");
    edit.addEventListener("click", () => {
      for (const column of columns) {
        column.messages.length = Math.min(column.messages.length, at);
        column.show();
      }
      $("prompt").value = text;
      $("prompt").focus();
    });
    return el(
      "div",
      { className: "message asked" },
      el("p", { className: "who" }, "You"),
      picture ? el("img", { src: picture.image_url.url, alt: "the image of this message" }) : null,
      el("p", { className: "text" }, text),
      el("div", { className: "actions" }, edit),
    );
  }

  parts(message) {
    const reasoning = message.reasoning
      ? el("details", { className: "reasoning" }, el("summary", {}, "Reasoning"), el("p", { className: "text" }, message.reasoning))
      : null;
    const calls = (message.tool_calls ?? []).map((call) => this.call(call));
    return [
      message.waits ? el("p", { className: "quiet" }, "Waiting for the first token…") : null,
      reasoning,
      ...markdown(message.content ?? ""),
      ...calls,
      message.error ? el("p", { className: "error" }, message.error) : null,
      message.figures ? el("p", { className: "quiet figures" }, message.figures) : null,
    ].filter(Boolean);
  }

  call(call) {
    const result = el("textarea", { rows: 2, className: "mono", "aria-label": `Result of ${call.function.name}` }),
      send = el("button", { type: "button" }, "Send the result");
    const answered = this.messages.some((one) => one.role === "tool" && one.tool_call_id === call.id);
    send.addEventListener("click", () => {
      this.messages.push({ role: "tool", tool_call_id: call.id, content: result.value });
      const calls = this.messages.findLast((one) => one.tool_calls).tool_calls;
      if (calls.every((one) => this.messages.some((each) => each.tool_call_id === one.id))) this.respond();
      else this.show();
    });
    return el(
      "div",
      { className: "call" },
      el("p", {}, el("strong", {}, call.function.name)),
      el("pre", {}, call.function.arguments),
      answered ? null : result,
      answered ? null : send,
    );
  }

  actions(at) {
    const again = el("button", { type: "button", className: "plain" }, "Retry");
    again.addEventListener("click", () => {
      this.messages.length = this.messages.slice(0, at).findLastIndex((one) => one.role !== "assistant") + 1;
      this.respond();
    });
    return el("div", { className: "actions" }, again);
  }

  sent() {
    return this.messages.map(({ role, content, tool_calls, tool_call_id }) => ({
      role,
      content: content ?? null,
      ...(tool_calls?.length ? { tool_calls } : {}),
      ...(tool_call_id ? { tool_call_id } : {}),
    }));
  }

  async respond() {
    const body = validBody(this.model, this.sent());
    if (!body) return;
    const message = { role: "assistant", content: "", waits: true },
      begun = performance.now();
    this.messages.push(message);
    this.abort = new AbortController();
    busy();
    this.show();
    const live = this.log.lastElementChild,
      draw = () => {
        live.replaceChildren(el("p", { className: "who" }, this.model), ...this.parts(message));
        this.log.scrollTop = this.log.scrollHeight;
      };
    let first = null,
      usage = null,
      waits = false;
    try {
      const response = await checked(await request("/v1/chat/completions", { method: "POST", json: body, signal: this.abort.signal }));
      for await (const event of events(response)) {
        if (event.error) throw new Error(event.error.message);
        usage = event.usage ?? usage;
        const delta = event.choices?.[0]?.delta;
        if (!delta) continue;
        if (first === null && (delta.content || delta.reasoning || delta.tool_calls)) first = performance.now();
        if (first !== null) message.waits = false;
        this.take(message, delta);
        if (!waits) {
          waits = true;
          requestAnimationFrame(() => {
            waits = false;
            draw();
          });
        }
      }
    } catch (error) {
      message.error = error.name === "AbortError" ? "Stopped." : wordsOf(error);
      if (error instanceof ApiError && error.status === 401) enter(error.message);
    }
    message.waits = false;
    message.figures = figures(usage, prices.get(this.model), begun, first, performance.now());
    this.abort = null;
    busy();
    this.show();
    await load(showLeft);
  }

  take(message, delta) {
    message.content += delta.content ?? "";
    const reasoning = delta.reasoning ?? delta.reasoning_content;
    if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
    for (const { index, id, function: named } of delta.tool_calls ?? []) {
      message.tool_calls ??= [];
      const call = (message.tool_calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
      call.id ||= id ?? "";
      call.function.name += named?.name ?? "";
      call.function.arguments += named?.arguments ?? "";
    }
  }
}

// The cost of a response, as the gateway computes it from the reported tokens.
function costOf(usage, price) {
  const cached = Math.min(usage.prompt_tokens_details?.cached_tokens ?? 0, usage.prompt_tokens),
    reasoning = Math.min(usage.completion_tokens_details?.reasoning_tokens ?? 0, usage.completion_tokens);
  return (
    (usage.prompt_tokens - cached) * price.prompt +
    cached * price.input_cache_read +
    (usage.completion_tokens - reasoning) * price.completion +
    reasoning * price.internal_reasoning
  );
}
// What is left of the limits of the key: the scarcest limit of each kind.
async function showLeft() {
  const { limits } = await api("/v1/limits"),
    scarcest = new Map(),
    share = (one) => one.remaining / one.amount;
  for (const one of limits.filter(({ remaining, amount }) => typeof remaining === "number" && amount)) {
    const kind = one.limit.split("_")[0],
      known = scarcest.get(kind);
    if (!known || share(one) < share(known)) scarcest.set(kind, one);
  }
  const line = (one) => `${limited(one.limit, `${amount(Math.max(one.remaining, 0))} of ${amount(one.amount)}`)} (${one.holder})`;
  $("left").textContent = scarcest.size ? `Left: ${[...scarcest.values()].map(line).join(" · ")}` : "No limit applies to this key.";
}
function figures(usage, price, begun, first, ended) {
  const parts = [];
  if (usage) parts.push(`${number(usage.prompt_tokens)} prompt and ${number(usage.completion_tokens)} completion tokens`);
  if (usage && price) parts.push(`cost ${costOf(usage, price).toLocaleString("en-US", { maximumSignificantDigits: 3 })} ${CURRENCY}`);
  if (first !== null) parts.push(`first token after ${duration((first - begun) / 1000)}`);
  if (usage && first !== null && ended > first && usage.completion_tokens > 1)
    parts.push(`${Math.round((usage.completion_tokens - 1) / ((ended - first) / 1000))} tokens per second`);
  return parts.join(" · ");
}

function busy() {
  const running = columns.some((column) => column.abort);
  $("send").textContent = running ? "Stop" : "Send";
  $("send").classList.toggle("danger", running);
}

function arrange() {
  const models = [$("model").value, $("other").value].filter(Boolean);
  for (const column of columns) if (!models.includes(column.model)) column.abort?.abort();
  columns = models.map((model, at) => (columns[at]?.model === model ? columns[at] : new Column(model)));
  $("columns").replaceChildren(...columns.map((column) => column.node));
  busy();
}

function stop() {
  for (const column of columns) column.abort?.abort();
}
function attach(url, name) {
  image = url;
  $("image-name").textContent = name ? `Remove ${name}` : "";
  $("image-name").hidden = !name;
  $("image").value = "";
}

function send(event) {
  event.preventDefault();
  if (columns.some((column) => column.abort)) return stop();
  const text = $("prompt").value.trim();
  if (!text && !image) {
    $("prompt").focus();
    return;
  }
  if (!validBody(columns[0].model, [])) return; // the message stays in its field
  const content = image
    ? [
        { type: "text", text },
        { type: "image_url", image_url: { url: image } },
      ]
    : text;
  $("prompt").value = "";
  attach(null, "");
  for (const column of columns) {
    column.messages.push({ role: "user", content });
    column.respond();
  }
}

start((models) => {
  const chats = models.filter((one) => !one.task || one.task === "chat").map((one) => one.id),
    wanted = new URLSearchParams(location.search).get("model");
  if (!chats.length) {
    $("page").replaceChildren(el("h1", {}, "Playground"), el("p", { className: "quiet" }, "This key may use no model for chat."));
    return;
  }
  prices = new Map(models.map((one) => [one.id, one.pricing]));
  $("model").replaceChildren(...chats.map((id) => el("option", { selected: id === wanted }, id)));
  $("other").replaceChildren(el("option", { value: "" }, "no other model"), ...chats.map((id) => el("option", {}, id)));
  $("parameters").replaceChildren(
    ...PARAMETERS.map(([name, title, min, max, step, usual]) =>
      el("label", {}, title, " ", el("input", { id: `parameter-${name}`, type: "number", min, max, step, placeholder: usual })),
    ),
  );
  $("model").onchange = $("other").onchange = arrange;
  $("composer").onsubmit = send;
  $("prompt").onkeydown = (event) => {
    if (event.key === "Escape") stop();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    // A message that is written during a response is not lost, and does not stop it.
    if (!columns.some((column) => column.abort)) $("composer").requestSubmit();
  };
  $("image-name").onclick = () => attach(null, "");
  $("clear").onclick = () => {
    stop();
    attach(null, "");
    for (const column of columns) {
      column.messages = [];
      column.show();
    }
    $("prompt").focus();
  };
  $("tools-example").onclick = () => {
    $("tools").value = JSON.stringify(TOOL, null, 2);
  };
  $("schema-example").onclick = () => {
    $("schema").value = JSON.stringify(SCHEMA, null, 2);
  };
  $("image").onchange = () => {
    const [file] = $("image").files,
      reader = new FileReader();
    if (!file) return;
    reader.onload = () => attach(reader.result, file.name);
    reader.readAsDataURL(file);
  };
  $("code").onclick = () => {
    const messages = columns[0].sent().filter((one, at, all) => at < all.length - 1 || one.role !== "assistant");
    const body = validBody(
      columns[0].model,
      messages.length ? messages : [{ role: "user", content: $("prompt").value.trim() || "Hello!" }],
    );
    if (!body) return;
    $("code-tabs").replaceChildren(codeTabs(body));
    $("code-dialog").showModal();
  };
  arrange();
  $("prompt").focus();
  return showLeft();
});
