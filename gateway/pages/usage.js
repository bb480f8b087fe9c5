// Limits and usage, for the pages of a key and of operators.

function limitBar(limit) {
  const title = el(
    "div",
    { className: "bar" },
    el("strong", {}, capital(nameOf(limit.limit))),
    el("span", { className: "quiet" }, limit.holder + (limit.models ? ` for ${limit.models.join(", ")}` : "")),
  );
  if (limit.used === null) return el("li", {}, title, el("p", {}, `At most ${amount(limit.amount)}.`));
  const share = limit.amount ? Math.min(limit.used / limit.amount, 1) : 1,
    state = share >= 1 ? "full" : share >= 0.8 ? "near" : "";
  const unit = limit.limit.startsWith("cost") ? ` ${CURRENCY}` : "";
  const words = `${amount(limit.used)} of ${amount(limit.amount)} used, ${amount(Math.max(limit.remaining ?? 0, 0))} left${unit}`;
  const reset = limit.reset_seconds > 0 ? `, resets in ${duration(Math.max(limit.reset_seconds, 1))}` : "";
  const note =
    state === "full" ? (limit.soft ? " Requests continue: this budget only warns." : " Requests wait or are refused until then.") : "";
  return el(
    "li",
    {},
    title,
    el("progress", { className: state, max: 1, value: share, "aria-label": `${nameOf(limit.limit)}: ${Math.round(100 * share)}% used` }),
    el("p", {}, `${words}${reset}.${note}`),
    limit.raised_until
      ? el("p", {}, `Raised from ${amount(limit.configured)} until `, when(Date.parse(limit.raised_until) / 1000), ".")
      : null,
  );
}

// All days of the period, so that the chart has an even axis.
function everyDay(rows, since) {
  const known = new Map(rows.map((row) => [row.day, row])),
    days = [];
  for (let time = Date.parse(since); time <= Date.now(); time += 86400000) {
    const day = new Date(time).toISOString().slice(0, 10);
    days.push(known.get(day) ?? { day, prompt_tokens: 0, completion_tokens: 0 });
  }
  return days;
}

// Two stacked bars for each group. The table below has the same numbers for readers.
function chart(rows, by) {
  const width = 720,
    height = 180,
    most = Math.max(...rows.map((row) => row.prompt_tokens + row.completion_tokens), 1),
    step = width / rows.length;
  const bars = rows.flatMap((row, at) => {
    const tall = (tokens) => ((height - 4) * tokens) / most,
      wide = Math.min(step * 0.7, 48),
      x = at * step + (step - wide) / 2;
    const prompt = tall(row.prompt_tokens),
      completion = tall(row.completion_tokens);
    return [
      svg(
        "rect",
        { x, y: height - prompt, width: wide, height: prompt, class: "prompt", rx: 1 },
        svg("title", {}, `${row[by] ?? "no model"}: ${number(row.prompt_tokens)} prompt tokens`),
      ),
      svg(
        "rect",
        { x, y: height - prompt - completion, width: wide, height: completion, class: "completion", rx: 1 },
        svg("title", {}, `${row[by] ?? "no model"}: ${number(row.completion_tokens)} completion tokens`),
      ),
    ];
  });
  const legend = el(
    "p",
    { className: "legend" },
    el("span", { className: "prompt" }),
    "prompt",
    el("span", { className: "completion" }),
    "completion",
    el("span", { className: "quiet most" }, `highest: ${number(most)} tokens`),
  );
  const axis = el(
    "p",
    { className: "axis" },
    el("span", {}, rows[0][by] ?? "no model"),
    rows.length > 1 ? el("span", {}, rows.at(-1)[by] ?? "no model") : null,
  );
  return el(
    "figure",
    { className: "chart" },
    svg("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", preserveAspectRatio: "none" }, ...bars),
    axis,
    legend,
  );
}

const columnsBy = (by) => [
  { title: capital(by), value: (row) => row[by] ?? "no model" },
  ...[
    ["requests", "Requests"],
    ["prompt_tokens", "Prompt tokens"],
    ["cached_tokens", "Cached tokens"],
    ["completion_tokens", "Completion tokens"],
    ["cost", "Cost"],
  ].map(([name, title]) => ({
    title,
    number: true,
    value: (row) => (row[name] === null ? null : amount(row[name])),
    text: (row) => row[name],
    note: unitOf(name),
  })),
];
