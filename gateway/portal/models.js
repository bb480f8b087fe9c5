const CAPABILITIES = [
  ["tools", "tools"],
  ["reasoning", "reasoning"],
  ["structured_outputs", "structured output"],
];
// The state of a model in words. Without a time nothing says when it will respond.
function stateOf({ value, retry_after: seconds }) {
  if (value === "loaded") return stateMark("ready");
  if (value === "loading") return stateMark("starting", seconds ? `starting, ready in about ${duration(seconds)}` : "starting");
  return seconds === undefined
    ? stateMark("failed", "not available")
    : stateMark("sleeping", `asleep, a request starts it in about ${duration(seconds)}`);
}
const million = (price) => amount(1e6 * Number(price));
function priceOf({ prompt, completion, input_cache_read: cached, internal_reasoning: reasoning }) {
  const parts = [`${million(prompt)} prompt`];
  if (Number(completion)) parts.push(`${million(completion)} completion`);
  if (cached !== prompt) parts.push(`${million(cached)} cached`);
  if (reasoning !== completion) parts.push(`${million(reasoning)} reasoning`);
  return parts.join(" · ");
}
function facts(model) {
  const inputs = (model.architecture?.input_modalities ?? []).filter((one) => one !== "text");
  const can = CAPABILITIES.filter(([name]) => model.supported_parameters?.includes(name)).map(([, text]) => text);
  return [
    ["Type", model.task ?? "not known yet"],
    ["Context", model.context_length ? `${number(model.context_length)} tokens` : "known when the model has started"],
    ["Supports", [...can, ...inputs].join(", ") || "text"],
    ["Price", model.pricing && el("span", {}, priceOf(model.pricing), el("small", { className: "quiet" }, " per 1M tokens"))],
    ["Aliases", model.aliases?.join(", ")],
    ["Adapter of", model.parent],
  ].filter(([, value]) => value);
}
const list = (pairs) => pairs.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);

function open(model) {
  $("model-title").textContent = model.id;
  $("model-facts").replaceChildren(...list(facts(model)));
  const body = { model: model.id, messages: [{ role: "user", content: "Say hello in one sentence." }], stream: true };
  const chats = !model.task || model.task === "chat";
  $("model-code").replaceChildren(...(chats ? [codeTabs(body)] : [setKey(), codeBlock(plainCode(model))]));
  $("model").showModal();
}
const ROUTES = { embedding: ["/v1/embeddings", { input: "Hello" }], completion: ["/v1/completions", { prompt: "Hello", max_tokens: 16 }] };
function plainCode(model) {
  const [path, fields] = ROUTES[model.task] ?? ["/v1/models", null];
  const body = fields
    ? ` \\\n  -H "Content-Type: application/json" \\\n  -d ${shellText(JSON.stringify({ model: model.id, ...fields }))}`
    : "";
  return `curl ${location.origin}${path} -H "Authorization: Bearer $VLLM_GATEWAY_KEY"${body}\n`;
}
const showModels = (models) => {
  const own = models.filter((one) => !one.root);
  $("models-note").textContent = own.length
    ? `This key may use ${own.length === 1 ? "one model" : `${own.length} models`}.${own.some((one) => one.pricing) ? ` Prices are ${CURRENCY}.` : ""}`
    : "This key may use no model. The operator of the gateway can change that.";
  $("models").replaceChildren(
    ...own.map((model) => {
      const details = el("button", { type: "button" }, "Show code");
      details.addEventListener("click", () => open(model));
      const talks = !model.task || model.task === "chat";
      return el(
        "article",
        { className: "card" },
        el("h2", {}, model.id),
        model.status ? el("p", {}, stateOf(model.status)) : null,
        el("dl", { className: "facts" }, ...list(facts(model))),
        el(
          "div",
          { className: "row" },
          talks ? el("a", { className: "button primary", href: `/portal/playground?model=${encodeURIComponent(model.id)}` }, "Chat") : null,
          details,
        ),
      );
    }),
  );
};
start((models) => {
  showModels(models);
  return refresh(10, async () => showModels((await api("/v1/models")).data));
});
