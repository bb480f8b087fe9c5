// People who have signed in can create keys. A session sends no requests to models: they need a key.
async function showPerson() {
  const response = document.body.dataset.signsIn ? await request("/sign-in/session") : null;
  $("account").textContent = "";
  $("sign-out").hidden = !response?.ok;
  if (!response?.ok) return false;
  $("account").textContent = (await response.json()).name;
  $("no-key").replaceChildren("No key? ", el("a", { href: "/portal/keys" }, "Create one"), ".");
  return true;
}
const start = (show) => {
  enterWith("/v1/models", ({ data }) => show(data));
  if (document.body.dataset.signsIn) load(showPerson);
};

// Code that sends a body, in the languages of the SDKs. JSON is a valid expression of Python if its three words are replaced.
const shellText = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
function pythonText(value, indent = 0) {
  const pad = " ".repeat(indent + 4),
    end = " ".repeat(indent);
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value))
    return value.length ? `[\n${value.map((each) => `${pad}${pythonText(each, indent + 4)},\n`).join("")}${end}]` : "[]";
  if (typeof value === "object")
    return `{\n${Object.entries(value)
      .map(([name, each]) => `${pad}${JSON.stringify(name)}: ${pythonText(each, indent + 4)},\n`)
      .join("")}${end}}`;
  return JSON.stringify(value);
}
const OPENAI = new Set(
  "messages model stream temperature top_p max_tokens tools response_format stop seed n frequency_penalty presence_penalty".split(" "),
);
function codeOf(body) {
  const url = location.origin,
    stream = Boolean(body.stream),
    shown = Object.fromEntries(Object.entries(body).filter(([name]) => name !== "stream_options"));
  const known = Object.entries(shown).filter(([name]) => OPENAI.has(name));
  const extra = Object.fromEntries(Object.entries(shown).filter(([name]) => !OPENAI.has(name)));
  const named = known.map(([name, value]) => `    ${name}=${pythonText(value, 4)},\n`).join("");
  const more = Object.keys(extra).length ? `    extra_body=${pythonText(extra, 4)},\n` : "";
  const curl = `curl -N ${url}/v1/chat/completions \\\n  -H "Authorization: Bearer $VLLM_GATEWAY_KEY" \\\n  -H "Content-Type: application/json" \\\n  -d @- <<'JSON'\n${JSON.stringify(shown, null, 2)}\nJSON\n`;
  const python =
    `import os\n\nfrom openai import OpenAI\n\nclient = OpenAI(base_url="${url}/v1", api_key=os.environ["VLLM_GATEWAY_KEY"])\n${stream ? "stream" : "response"} = client.chat.completions.create(\n${named}${more})\n` +
    (stream
      ? `for event in stream:\n    if event.choices:\n        print(event.choices[0].delta.content or "", end="", flush=True)\nprint()\n`
      : "print(response.choices[0].message.content)\n");
  const script =
    `import OpenAI from "openai";\n\nconst client = new OpenAI({ baseURL: "${url}/v1", apiKey: process.env.VLLM_GATEWAY_KEY });\nconst ${stream ? "stream" : "response"} = await client.chat.completions.create(${JSON.stringify(shown, null, 2)});\n` +
    (stream
      ? `for await (const event of stream) process.stdout.write(event.choices[0]?.delta?.content ?? "");\nconsole.log();\n`
      : "console.log(response.choices[0].message.content);\n");
  return [
    ["curl", curl],
    ["Python", python],
    ["JavaScript", script],
    ["Anthropic SDK", anthropicCode(shown, url)],
  ];
}
// The messages of a chat in Anthropic's form (Messages API, "content blocks").
function anthropicBlock(part) {
  if (part.type !== "image_url") return part;
  const [, media_type, data] = /^data:([^;]+);base64,(.*)$/.exec(part.image_url.url);
  return { type: "image", source: { type: "base64", media_type, data } };
}
function anthropicMessage({ role, content, tool_calls, tool_call_id }) {
  if (role === "tool") return { role: "user", content: [{ type: "tool_result", tool_use_id: tool_call_id, content }] };
  if (Array.isArray(content)) return { role, content: content.map(anthropicBlock) };
  if (!tool_calls) return { role, content: content ?? "" };
  const calls = tool_calls.map((call) => ({
    type: "tool_use",
    id: call.id,
    name: call.function.name,
    input: JSON.parse(call.function.arguments || "{}"),
  }));
  return { role, content: [...(content ? [{ type: "text", text: content }] : []), ...calls] };
}
function anthropicCode(body, url) {
  const system = body.messages.find((one) => one.role === "system");
  // The newest SDK has no arguments for sampling parameters.
  const extra = Object.fromEntries(["temperature", "top_p"].filter((name) => name in body).map((name) => [name, body[name]]));
  const fields = {
    model: body.model,
    max_tokens: body.max_tokens ?? 1024,
    messages: body.messages.filter((one) => one !== system).map(anthropicMessage),
    ...(system ? { system: system.content } : {}),
    ...(body.tools
      ? {
          tools: body.tools.map(({ function: { name, description = "", parameters } }) => ({
            name,
            description,
            input_schema: parameters,
          })),
        }
      : {}),
    ...(body.response_format
      ? { output_config: { format: { type: "json_schema", schema: body.response_format.json_schema.schema } } }
      : {}),
    ...(Object.keys(extra).length ? { extra_body: extra } : {}),
  };
  const named = Object.entries(fields)
    .map(([name, value]) => `    ${name}=${pythonText(value, 4)},\n`)
    .join("");
  return `import os\n\nfrom anthropic import Anthropic\n\nclient = Anthropic(base_url="${url}", auth_token=os.environ["VLLM_GATEWAY_KEY"])\nwith client.messages.stream(\n${named}) as stream:\n    for text in stream.text_stream:\n        print(text, end="", flush=True)\nprint()\n`;
}
// Code reads the key from the environment. The key itself is copied, but not shown: others may see the screen.
const setKey = () => {
  const key = sessionStorage.getItem(KEY) ?? "sk-…";
  return el(
    "div",
    {},
    el("p", { className: "quiet" }, "First set your key in the shell. Copy copies the whole key."),
    codeBlock(`export VLLM_GATEWAY_KEY=${shellText(key)}\n`, `export VLLM_GATEWAY_KEY='${key.slice(0, 6)}…'`),
  );
};
const codeTabs = (body) =>
  el(
    "div",
    {},
    setKey(),
    tabs(
      codeOf(body).map(([title, text]) => [title, codeBlock(text)]),
      "Languages",
    ),
  );
