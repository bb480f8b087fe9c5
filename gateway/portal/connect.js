const url = location.origin;
const PROGRAMS = [
  ["OpenAI SDK", (model) => `export OPENAI_BASE_URL=${url}/v1\nexport OPENAI_API_KEY=$VLLM_GATEWAY_KEY\n# model: ${model}\n`],
  ["Anthropic SDK", (model) => `export ANTHROPIC_BASE_URL=${url}\nexport ANTHROPIC_AUTH_TOKEN=$VLLM_GATEWAY_KEY\n# model: ${model}\n`],
  [
    "Claude Code",
    (model) =>
      `export ANTHROPIC_BASE_URL=${url}\nexport ANTHROPIC_AUTH_TOKEN=$VLLM_GATEWAY_KEY\nexport ANTHROPIC_MODEL=${shellText(model)}\nexport ANTHROPIC_SMALL_FAST_MODEL=${shellText(model)}\nclaude\n`,
  ],
  [
    "Codex",
    (model) =>
      `# ~/.codex/config.toml\nmodel = ${JSON.stringify(model)}\nmodel_provider = "vllm-gateway"\n\n[model_providers.vllm-gateway]\nname = "vllm-gateway"\nbase_url = "${url}/v1"\nenv_key = "VLLM_GATEWAY_KEY"\nwire_api = "responses"\n`,
  ],
  [
    "aider",
    (model) => `export OPENAI_API_BASE=${url}/v1\nexport OPENAI_API_KEY=$VLLM_GATEWAY_KEY\naider --model ${shellText(`openai/${model}`)}\n`,
  ],
  [
    "Continue",
    (model) =>
      `# ~/.continue/config.yaml\nname: vllm-gateway\nversion: 1.0.0\nschema: v1\nmodels:\n  - name: ${JSON.stringify(model)}\n    provider: openai\n    model: ${JSON.stringify(model)}\n    apiBase: ${url}/v1\n    apiKey: YOUR_KEY\n`,
  ],
  ["Cline", (model) => `API provider: OpenAI Compatible\nBase URL:     ${url}/v1\nAPI key:      YOUR_KEY\nModel ID:     ${model}\n`],
  ["Open WebUI", () => `OPENAI_API_BASE_URL=${url}/v1\nOPENAI_API_KEY=YOUR_KEY\nENABLE_FORWARD_USER_INFO_HEADERS=true\n`],
  [
    "LangChain",
    (model) =>
      `import os\n\nfrom langchain_openai import ChatOpenAI\n\nmodel = ChatOpenAI(base_url="${url}/v1", api_key=os.environ["VLLM_GATEWAY_KEY"], model=${JSON.stringify(model)})\nprint(model.invoke("Say hello.").content)\n`,
  ],
];
start((models) => {
  const chats = models.filter((one) => !one.task || one.task === "chat");
  $("connect-test").disabled = !chats.length;
  $("connect-model").replaceChildren(...chats.map((one) => el("option", {}, one.id)));
  const show = () =>
    $("connect-list").replaceChildren(
      setKey(),
      tabs(
        PROGRAMS.map(([name, text]) => [name, codeBlock(text($("connect-model").value || "MODEL"))]),
        "Programs",
      ),
    );
  $("connect-model").onchange = show;
  $("connect-test").onclick = async () => {
    const begun = performance.now();
    $("connect-result").textContent = "Waiting for a response…";
    try {
      const body = { model: $("connect-model").value, messages: [{ role: "user", content: "Say OK." }], max_tokens: 8 };
      await api("/v1/chat/completions", { method: "POST", json: body });
      $("connect-result").textContent = `It works: a response after ${duration((performance.now() - begun) / 1000)}.`;
    } catch (error) {
      $("connect-result").textContent = wordsOf(error);
    }
  };
  show();
});
