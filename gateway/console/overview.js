// The last hour is fetched once; each event adds its newest point. The page computes nothing that the gateway has not said.
let hour = null,
  latest = null,
  paused = false;
const HOUR = 3600;
const fixed = (value) => (value >= 100 ? number(Math.round(value)) : String(Number(value.toFixed(value >= 10 ? 1 : 2))));
const short = (value) => (value >= 1e6 ? `${fixed(value / 1e6)}M` : value >= 1e4 ? `${fixed(value / 1e3)}k` : fixed(value));
const seconds = (value) => (value === null ? "–" : value < 1 ? `${Math.round(1000 * value)} ms` : `${fixed(value)} s`);
// The charts: `stacked` are areas on top of each other, the others are lines. A series has its column, title and color, and perhaps the page
// that its number opens.
const CHARTS = [
  {
    title: "Requests per second",
    stacked: true,
    show: short,
    series: [
      ["succeeded", "Succeeded", "succeeded"],
      ["rejected", "Rejected (4xx)", "rejected"],
      ["errors", "Errors (5xx, cut off)", "errors"],
    ],
  },
  {
    title: "Tokens per second",
    stacked: true,
    show: short,
    series: [
      ["prompt", "Prompt", "prompt"],
      ["completion", "Completion", "completion"],
    ],
  },
  {
    title: "Requests in flight and queued",
    show: short,
    series: [
      ["in_flight", "In flight", "succeeded"],
      ["queued", "Queued", "rejected", "/console/queue"],
    ],
  },
  {
    title: "Time to first token",
    show: seconds,
    series: [
      ["first_token_p50", "Median", "succeeded"],
      ["first_token_p95", "95th percentile", "rejected"],
    ],
  },
];
const WIDTH = 720,
  HEIGHT = 160;
const HEADLINES = {
  ready: ["Ready", "All models are served as configured."],
  degraded: ["Degraded", "Some requests cannot be served as configured."],
  not_ready: ["Not ready", "The gateway accepts no requests."],
};

// The largest value of an axis: 1, 2 or 5 times a power of ten.
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((each) => each * power >= value * 0.999);
}

// Several points share a column of pixels, so a chart shows the mean of them, and a gap where the gateway has none.
function buckets(rows, column, from, span, count) {
  const found = Array.from({ length: count }, () => []);
  for (const row of rows) {
    const at = Math.floor(((row[0] - from) / span) * count);
    if (at >= 0 && at < count && row[column] !== null) found[at].push(row[column]);
  }
  return found.map((each) => (each.length ? each.reduce((sum, value) => sum + value, 0) / each.length : null));
}

// Runs of neighboring points without a gap. A single gap is passed over, since a column may lie between two samples.
function runs(values) {
  const found = [];
  let run = [];
  values.forEach((value, at) => {
    if (value !== null) run.push(at);
    else if (run.length && values[at + 1] === undefined) return;
    else if (run.length && values[at + 1] === null) {
      found.push(run);
      run = [];
    }
  });
  if (run.length) found.push(run);
  return found;
}

// The seconds that a chart shows: an hour, or a shorter time soon after a start, so that its line is wide enough to be read.
function shownSpan() {
  const recorded = latest.time - (hour.points[0]?.[0] ?? latest.time);
  return [300, 900, 1800].find((span) => recorded <= span) ?? HOUR;
}

function drawn(chart, rows, until) {
  const span = shownSpan(),
    count = Math.min(180, Math.floor(span / (2 * hour.step)));
  const all = chart.series.map(([name]) => buckets(rows, hour.columns.indexOf(name), until - span, span, count));
  const tops = [];
  all.forEach((values, at) =>
    tops.push(values.map((value, x) => (value === null ? null : value + (chart.stacked && at ? (tops[at - 1][x] ?? 0) : 0)))),
  );
  const most = ceiling(Math.max(0, ...tops.flat().filter((value) => value !== null)));
  const x = (at) => (((at + 0.5) / count) * WIDTH).toFixed(1),
    y = (value) => (HEIGHT - 1 - (value / most) * (HEIGHT - 8)).toFixed(1);
  const shapes = tops.map((values, at) =>
    runs(values).map((run) => {
      const line = run.map((each) => `${x(each)},${y(values[each])}`).join("L");
      const below = (each) => y(at ? (tops[at - 1][each] ?? 0) : 0);
      const base = chart.stacked
        ? [...run]
            .reverse()
            .map((each) => `${x(each)},${below(each)}`)
            .join("L")
        : "";
      const d = chart.stacked ? `M${line}L${base}Z` : `M${line}`;
      return svg("path", { d, class: `${chart.stacked ? "area" : "line"} ${chart.series[at][2]}` });
    }),
  );
  const lines = [0.5, 1].map((share) => svg("line", { x1: 0, x2: WIDTH, y1: y(share * most), y2: y(share * most), class: "grid" }));
  return { most, all, shapes: [...lines, ...shapes.flat()] };
}

function chartCard(chart) {
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  // The numbers stay the same nodes, so that the focus stays on a link.
  const values = chart.series.map(() => el("strong"));
  const nows = chart.series.map(([, title, , page], at) => {
    const parts = [values[at], ` ${title.toLowerCase().replace(/ \(.*/, "")}`];
    return page ? el("a", { href: page }, ...parts) : el("span", {}, ...parts);
  });
  const most = el("span", { className: "most quiet" }),
    now = el("p", { className: "now" }, ...nows),
    rows = el("tbody");
  const head = ["Minutes ago", ...chart.series.map(([, title]) => title)].map((title) => el("th", { scope: "col" }, title));
  const table = el("table", {}, el("caption", {}, `${chart.title}, means of five minutes`), el("thead", {}, el("tr", {}, ...head)), rows);
  const keys = chart.series.map(([, title, color]) => el("span", {}, el("i", { className: color }), title));
  const axis = el("p", { className: "axis" }, el("span"), el("span"), el("span", {}, "now"));
  const readout = el("p", { className: "readout", hidden: true });
  const plot = el("div", { className: "plot" }, most, picture, readout);
  const card = el("article", { className: "chart" }, el("h3", {}, chart.title), now, plot, axis, el("p", { className: "keys" }, ...keys));
  card.append(el("div", { className: "hidden" }, table));
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect(),
      at = latest.time - shownSpan() * (1 - (event.clientX - box.left) / box.width);
    const row = hour.points.reduce((best, each) => (!best || Math.abs(each[0] - at) < Math.abs(best[0] - at) ? each : best), null);
    if (!row || Math.abs(row[0] - at) > 30) readout.hidden = true;
    else {
      const values = chart.series.map(([name, title]) => `${title} ${chart.show(row[hour.columns.indexOf(name)] ?? null)}`);
      readout.replaceChildren(when(row[0]), ` · ${values.join(" · ")}`);
      readout.hidden = false;
    }
  });
  plot.addEventListener("pointerleave", () => {
    readout.hidden = true;
  });
  const update = (until) => {
    const made = drawn(chart, hour.points, until);
    picture.replaceChildren(...made.shapes);
    axis.children[0].textContent = `${shownSpan() / 60} min ago`;
    axis.children[1].textContent = shownSpan() / 120;
    most.textContent = chart.show(made.most);
    const last = hour.points.at(-1);
    chart.series.forEach(([name], at) => {
      const value = last ? last[hour.columns.indexOf(name)] : null;
      values[at].textContent = value === null ? "–" : chart.show(value);
    });
    const means = chart.series.map(([name]) => buckets(hour.points, hour.columns.indexOf(name), until - HOUR, HOUR, 12));
    rows.replaceChildren(
      ...means[0].map((_, at) =>
        el(
          "tr",
          {},
          el("th", { scope: "row" }, `${60 - 5 * at} to ${55 - 5 * at}`),
          ...means.map((each) => el("td", {}, each[at] === null ? "no data" : chart.show(each[at]))),
        ),
      ),
    );
  };
  return { card, update };
}
const cards = CHARTS.map(chartCard);

const figure = (title, value, note, page) =>
  el(
    "div",
    {},
    el("dt", {}, page ? el("a", { href: page }, title) : title),
    el("dd", {}, el("strong", {}, value), note ? el("span", { className: "quiet" }, ` ${note}`) : null),
  );

function showFigures() {
  const { models, servers, workers, cost } = latest;
  const money = cost?.today === undefined ? "–" : cost.today.toLocaleString("en-US", { maximumFractionDigits: cost.today < 10 ? 4 : 2 });
  const why = !cost ? "is being added up" : cost.unknown ? `: ${cost.unknown}` : CURRENCY;
  $("figures").replaceChildren(
    figure("Models ready", `${models.ready} of ${models.all}`, "", "/console/models"),
    figure("Servers up", `${servers.ready} of ${servers.all}`, "", "/console/models"),
    figure("Workers up", `${workers.ready} of ${workers.all}`, "", "/console/system"),
    figure("Cost today (UTC)", money, why, "/console/usage"),
  );
}

const firing = () => latest.alerts.filter((alert) => alert.fires <= latest.time);
const MOST_NAMED = 3; // alerts in the verdict
function showVerdict() {
  const { status, reasons, reload } = latest,
    alerts = firing(),
    [state, meaning] = HEADLINES[status];
  const said = [...reasons];
  if (!reload.successful) said.push("The last change of the configuration was rejected. The previous configuration is in use.");
  const items = said.map((reason) =>
    el("li", {}, /configuration/.test(reason) ? el("a", { href: "/console/configuration" }, reason) : capital(reason)),
  );
  items.push(...alerts.slice(0, MOST_NAMED).map((alert) => el("li", {}, el("a", { href: alert.page }, capital(alert.summary)))));
  if (alerts.length > MOST_NAMED)
    items.push(el("li", {}, el("a", { href: "#alerts-title" }, `${plural(alerts.length - MOST_NAMED, "more alert")}`)));
  const headline = el("span", {}, state);
  if (alerts.length)
    headline.append(
      ", ",
      el("a", { href: "#alerts-title" }, `${plural(alerts.length, "alert")} ${alerts.length === 1 ? "fires" : "fire"}`),
    );
  headline.append(status === "ready" && alerts.length ? "." : `. ${meaning}`);
  $("verdict").dataset.status =
    status === "ready" && alerts.length ? (alerts.some(({ severity }) => severity === "critical") ? "not_ready" : "degraded") : status;
  // The region is live, so it changes only if its text does.
  if ($("headline").textContent !== headline.textContent) $("headline").replaceChildren(headline);
  if ($("reasons").textContent !== items.map((each) => each.textContent).join("")) $("reasons").replaceChildren(...items);
}

// The counts of the last hour. Each opens the requests that it counts.
function showOutcomes() {
  const { since, errors, rejected } = latest.outcomes,
    from = new Date(1000 * since).toISOString().replace(/\.\d+/, "");
  const counts = [
    ["errors", plural(errors, "error")],
    ["rejected", `${number(rejected)} rejected`],
  ];
  $("outcomes").replaceChildren(
    ...counts.flatMap(([status, text], at) => [
      at ? " · " : "",
      el("a", { href: `/console/requests${query({ status, since: from })}` }, text),
    ]),
  );
}

function showAlerts() {
  const rows = latest.alerts.map((alert) => {
    const fires = alert.fires <= latest.time,
      left = Math.max(alert.fires - latest.time, 1);
    const state = fires ? alert.severity : "pending";
    return el(
      "li",
      { className: state },
      el(
        "p",
        {},
        stateMark(fires ? "failed" : "starting", fires ? capital(alert.severity) : "Pending"),
        " ",
        el("strong", {}, capital(alert.summary)),
      ),
      el(
        "p",
        { className: "quiet" },
        el("code", {}, alert.name),
        " since ",
        when(alert.since),
        fires ? "" : `, fires in ${duration(left)} if it lasts`,
        " · ",
        el("a", { href: alert.page }, `Open ${alert.page.match(/console\/(\w+)/)[1]}`),
      ),
    );
  });
  const empty = el(
    "p",
    { className: "quiet" },
    "No alert fires. Rules that need more than an hour of data are checked by Prometheus only.",
  );
  $("alerts").replaceChildren(rows.length ? el("ul", { className: "entries" }, ...rows) : empty);
}

async function showChanges() {
  if (!may("admin")) {
    $("changes").replaceChildren(el("p", { className: "quiet" }, "The audit log needs the role admin."));
    return;
  }
  const { changes, unknown } = await api("/admin/v1/overview/changes");
  const rows = (changes ?? [])
    .slice(0, 12)
    .map((each) =>
      el(
        "li",
        {},
        el("p", {}, el("code", {}, each.action), " ", el("strong", {}, each.target)),
        el("p", { className: "quiet" }, when(each.time), ` by ${each.by}`),
      ),
    );
  const more = (changes ?? []).length - rows.length;
  if (more > 0) rows.push(el("li", {}, el("a", { href: "/console/audit" }, `${more} more in the audit log`)));
  const empty = el("p", { className: "quiet" }, unknown ? `${capital(unknown)}.` : "Nothing was changed in the last 24 hours.");
  $("changes").replaceChildren(rows.length ? el("ul", { className: "entries" }, ...rows) : empty);
}

function showAll() {
  showVerdict();
  showOutcomes();
  showFigures();
  showAlerts();
  for (const each of cards) each.update(latest.time);
  const first = hour.points[0]?.[0];
  $("covers").textContent = first && latest.time - first < HOUR - 60 ? `The gateway started ${duration(latest.time - first)} ago.` : "";
  $("as-of").replaceChildren(...(paused ? ["Paused at ", when(latest.time)] : liveAt(latest.time)));
}

async function fetchAll() {
  latest = await api("/admin/v1/overview");
  hour = latest.history;
  showAll();
  await showChanges();
}

function showEvent(event) {
  const last = hour.points.at(-1)?.[0] ?? 0; // no point yet: the gateway has just started
  const { recorded, started } = latest;
  latest = event;
  // After an interruption, or a start of the gateway, the hour is fetched again.
  if (event.started !== started || (last && event.time - last > 3 * hour.step)) return load(fetchAll);
  if (event.point && event.point[0] > last) hour.points.push(event.point);
  while (hour.points.length && event.time - hour.points[0][0] > HOUR) hour.points.shift();
  showAll();
  if (recorded !== event.recorded) load(showChanges);
}

start(async () => {
  $("charts").replaceChildren(...cards.map((each) => each.card));
  $("pause").onclick = () => {
    paused = !paused;
    $("pause").textContent = paused ? "Resume" : "Pause";
    $("pause").setAttribute("aria-pressed", String(paused));
    if (paused) showAll();
    else load(fetchAll);
  };
  await fetchAll();
  follow("/admin/v1/overview/events", showEvent, () => paused || document.hidden);
});
