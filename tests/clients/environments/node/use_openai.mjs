// The openai package for Node, as its README shows it. Told and telling as scripts/report.py says.
import OpenAI from "openai";

const TASK = JSON.parse(process.env.TASK);
const client = new OpenAI({ baseURL: `${TASK.url}/v1`, apiKey: TASK.key });
const completions = client.chat.completions;
const user = (text) => [{ role: "user", content: text }];

async function chat() {
  const answer = await completions.create({ model: TASK.model, messages: user(TASK.hello) });
  return { text: answer.choices[0].message.content, model: answer.model, tokens: answer.usage.completion_tokens, request: answer._request_id };
}

async function stream() {
  const asked = { model: TASK.model, messages: user(TASK.hello), stream: true, stream_options: { include_usage: true } };
  const pieces = [];
  let tokens = null;
  for await (const chunk of await completions.create(asked)) {
    if (chunk.choices[0]?.delta.content) pieces.push(chunk.choices[0].delta.content);
    tokens = chunk.usage?.completion_tokens ?? tokens;
  }
  return { text: pieces.join(""), pieces: pieces.length, tokens };
}

async function tool() {
  const answer = await completions.create({ model: TASK.model, messages: user(TASK.weather), tools: [TASK.tool] });
  const call = answer.choices[0].message.tool_calls[0].function;
  return { name: call.name, arguments: JSON.parse(call.arguments) };
}

async function streamedTool() {
  const asked = { model: TASK.model, messages: user(TASK.weather), tools: [TASK.tool] };
  const call = await completions.stream(asked).finalMessage().then((message) => message.tool_calls[0].function);
  return { name: call.name, arguments: JSON.parse(call.arguments) };
}

async function responses() {
  const asked = { model: TASK.model, input: TASK.hello };
  const answer = await client.responses.create(asked);
  const events = [];
  for await (const event of await client.responses.create({ ...asked, stream: true })) events.push(event);
  const pieces = events.filter((event) => event.type === "response.output_text.delta").map((event) => event.delta);
  return { text: answer.output_text, streamed: pieces.join(""), pieces: pieces.length, last: events.at(-1).type };
}

async function cancel() {
  const answer = await completions.create({ model: TASK.model, messages: user(TASK.cancel), stream: true, ...TASK.slow });
  let pieces = 0;
  for await (const _ of answer) {
    if (++pieces < 3) continue;
    answer.controller.abort();
    break; // what had been read with the third piece would still come
  }
  return { pieces };
}

async function again() {
  const answer = await completions.create({ model: TASK.busy_model, messages: user(TASK.again) });
  return { text: answer.choices[0].message.content };
}

async function models() {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  return ids;
}

function classes(error) {
  const names = [];
  for (let kind = error.constructor; kind.name; kind = Object.getPrototypeOf(kind)) names.push(`openai.${kind.name}`);
  return names;
}

function refused(ask) {
  return async () => {
    try {
      return { answered: JSON.stringify(await ask()) };
    } catch (error) {
      return { classes: classes(error), words: error.message, status_code: error.status ?? null, code: error.code ?? null };
    }
  };
}

const unauthenticated = client.withOptions({ apiKey: TASK.wrong_key });
const cases = {
  cancel,
  chat,
  stream,
  tool,
  streamed_tool: streamedTool,
  models,
  responses,
  wrong_key: refused(() => unauthenticated.chat.completions.create({ model: TASK.model, messages: user(TASK.hello) })),
  unknown_model: refused(() => completions.create({ model: TASK.unknown_model, messages: user(TASK.hello) })),
  too_long: refused(() => completions.create({ model: TASK.model, messages: user(TASK.too_long) })),
  too_long_streamed: refused(() => completions.create({ model: TASK.model, messages: user(TASK.too_long), stream: true })),
  again,
};

const results = {};
for (const [name, run] of Object.entries(cases)) {
  try {
    results[name] = await run();
  } catch (error) {
    results[name] = { failed: error.stack };
  }
}
console.log(JSON.stringify({ ...results, ended: Date.now() / 1000 }));
