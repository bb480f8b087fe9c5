"use strict";
// Everything that comes from the gateway or a person is inserted as text: no function here parses markup.
const KEY = "vllm-gateway-key";
const $ = (id) => document.getElementById(id);

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
  throw new ApiError(response.status, error.message ?? `The gateway responded with status ${response.status}.`, error.code);
}

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
    if (error instanceof ApiError && error.status === 401) enter(sessionStorage.getItem(KEY) ? error.message : "");
    else if (error instanceof ApiError) {
      $("lost").textContent = error.message;
      $("lost").hidden = false;
    } else if (error instanceof TypeError && /fetch|network/i.test(error.message)) lost(() => load(show));
    else throw error;
  }
}

function enter(message) {
  sessionStorage.removeItem(KEY);
  $("page").hidden = $("leave").hidden = true;
  $("enter").hidden = false;
  $("enter-error").textContent = message;
  $("key").value = "";
  $("key").focus();
}

function start(show) {
  const fragment = new URLSearchParams(location.hash.slice(1)).get("key");
  if (fragment) {
    sessionStorage.setItem(KEY, fragment);
    history.replaceState(null, "", location.pathname);
  }
  const open = () =>
    load(async () => {
      const { data } = await api("/v1/models");
      $("enter").hidden = true;
      $("page").hidden = false;
      $("leave").hidden = !sessionStorage.getItem(KEY);
      await show(data);
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
}

async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select the text and copy it";
  }
  setTimeout(() => {
    button.textContent = before;
  }, 2000);
}

function codeBlock(text) {
  const button = el("button", { type: "button", className: "plain copy" }, "Copy");
  button.addEventListener("click", () => copy(text, button));
  return el("div", { className: "code" }, button, el("pre", { tabIndex: 0 }, el("code", {}, text)));
}

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

const number = (value) => Number(value).toLocaleString("en-US");
function duration(seconds) {
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} hours` : `${Math.round(seconds / 86400)} days`;
}

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
  const curl = `curl -N ${url}/v1/chat/completions \\\n  -H "Authorization: Bearer $VLLM_GATEWAY_KEY" \\\n  -H "Content-Type: application/json" \\\n  -d ${shellText(JSON.stringify(shown, null, 2))}\n`;
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
function anthropicCode(body, url) {
  const system = body.messages.find((one) => one.role === "system");
  const messages = body.messages
    .filter((one) => one.role === "user" || (one.role === "assistant" && one.content))
    .map(({ role, content }) => ({ role, content }));
  const fields = {
    model: body.model,
    max_tokens: body.max_tokens ?? 1024,
    messages,
    ...(system ? { system: system.content } : {}),
    ...(body.temperature === undefined ? {} : { temperature: body.temperature }),
  };
  const named = Object.entries(fields)
    .map(([name, value]) => `    ${name}=${pythonText(value, 4)},\n`)
    .join("");
  return `import os\n\nfrom anthropic import Anthropic\n\nclient = Anthropic(base_url="${url}", auth_token=os.environ["VLLM_GATEWAY_KEY"])\nwith client.messages.stream(\n${named}) as stream:\n    for text in stream.text_stream:\n        print(text, end="", flush=True)\nprint()\n`;
}
const codeTabs = (body) =>
  tabs(
    codeOf(body).map(([title, text]) => [title, codeBlock(text)]),
    "Languages",
  );
