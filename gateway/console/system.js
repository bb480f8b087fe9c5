const bytes = (value) => (value === undefined ? null : `${Math.round(value / 2 ** 20).toLocaleString("en-US")} MiB`);
let overview = null;

const WORKERS = [
  { title: "Worker", value: (each) => String(each.number) },
  { title: "State", value: (each) => (each.up ? stateMark("up") : stateMark(each.pid === null ? "down" : "starting")) },
  { title: "Since", value: (each) => (each.since === null ? null : when(each.since)) },
  { title: "Connections", number: true, value: (each) => (each.connections === null ? null : number(each.connections)) },
  { title: "Memory", number: true, value: (each) => bytes(overview.processes[each.number]?.resident_memory_bytes) },
  { title: "Open files", number: true, value: (each) => each.pid && number(overview.processes[each.number]?.open_fds ?? 0) },
  { title: "Restarts", number: true, value: (each) => number(each.restarts) },
  { title: "Process", number: true, value: (each) => each.pid && String(each.pid) },
];
const NAMES = {
  limits_store: "Limits store (Redis)",
  ledger_database: "Database of the ledger",
  ledger_spool: "Spool of the ledger",
  key_store: "Store of keys",
  audit_log: "Audit log",
  identity_provider: "Identity provider",
  discovery: "Discovery",
  kv_events: "KV cache events",
  certificate: "Certificate",
};
const DEPENDENCIES = [
  {
    title: "Dependency",
    value: (each) => [NAMES[each.name] ?? each.name, each.subject ? el("span", { className: "quiet" }, ` ${each.subject}`) : ""],
  },
  { title: "State", value: (each) => stateMark(each.state) },
  { title: "Since", value: (each) => when(each.since) },
  {
    title: "Last error",
    value: (each) => (each.last_error ? el("span", { className: each.state === "up" ? "quiet" : "" }, each.last_error) : null),
  },
];
const SENT = { waiting: "starting", sent: "ready", failed: "failed" };
const NOTICES = [
  { title: "Notice", value: (each) => each.notice },
  { title: "Text", value: (each) => el("span", {}, each.text) },
  { title: "Created", value: (each) => when(Date.parse(each.created) / 1000) },
  { title: "State", value: (each) => stateMark(SENT[each.state] ?? "starting", each.state) },
  { title: "Attempts", number: true, value: (each) => number(each.attempts) },
  { title: "Result", value: (each) => each.result },
];

async function showNotices(configured) {
  let notices = [],
    said = configured
      ? "No notice was sent yet. Notices announce budgets that are nearly used and keys that expire."
      : "Notices are not set up. They announce budgets that are nearly used and keys that expire. Add notices to gateway.yaml.";
  try {
    if (configured) ({ notices } = await api("/admin/v1/notices?limit=50"));
  } catch (error) {
    if (!(error instanceof ApiError) || error.status === 401) throw error;
    said = `${capital(error.message)}.`;
  }
  $("test").hidden = !configured || !may("operator");
  $("notices").replaceChildren(notices.length ? dataTable("Notices", NOTICES, notices) : el("p", { className: "quiet" }, said));
}

async function show() {
  const [status] = await Promise.all([
    api("/status"),
    api("/admin/v1/overview").then((known) => {
      overview = known;
    }),
  ]);
  await showNotices(status.notices !== null);
  $("workers").replaceChildren(dataTable("Workers", WORKERS, status.workers));
  $("dependencies").replaceChildren(
    status.dependencies.length
      ? dataTable("Dependencies", DEPENDENCIES, status.dependencies)
      : el("p", { className: "quiet" }, "The gateway uses no database, limits store or other service."),
  );
  const { version, core, python } = overview.build;
  $("about").replaceChildren(
    ...[
      ["Version", `vllm-gateway ${version}`],
      ["Core", core === "compiled" ? "compiled" : "Python (a compiled core is a separate wheel)"],
      ["Python", python],
      ["Started", el("span", {}, when(overview.started), ` (${duration(overview.time - overview.started)} ago)`)],
      ["License", "Apache-2.0"],
      ["Documents", el("a", { href: "/console/docs/" }, "Documents of this version")],
    ].flatMap(([title, value]) => [el("dt", {}, title), el("dd", {}, value)]),
  );
  $("docs").hidden = sessionStorage.getItem(KEY) !== null; // a tab with a token cannot send it in a header
  $("stop").hidden = !may("operator") || status.reason === "draining";
}

const METHODS = ["get", "post", "patch", "delete"];
async function showRoutes() {
  const { paths } = await api("/openapi.json");
  const rows = Object.entries(paths).flatMap(([path, of]) =>
    METHODS.filter((method) => of[method]).map((method) => ({ path, method, ...of[method] })),
  );
  const role = (row) => (row.security ? row.security.flatMap((each) => each.token ?? [])[0] : "none");
  const columns = [
    { title: "Route", value: (row) => el("code", {}, `${row.method.toUpperCase()} ${row.path}`) },
    { title: "Role", value: role },
    { title: "Description", value: (row) => row.summary.split("`").map((part, at) => (at % 2 ? el("code", {}, part) : part)) },
  ];
  $("routes").replaceChildren(dataTable("Routes of the admin API", columns, rows));
}

function drain() {
  const open = overview.point?.[overview.history.columns.indexOf("in_flight")] ?? 0;
  confirmAction({
    title: "Drain the gateway",
    words: `The gateway accepts no more requests and stops. ${plural(open, "open request")} may finish within the time of server.drain. Launched servers stop too. This console cannot start the gateway again.`,
    button: "Drain and stop",
    danger: true,
    command: "vllm-gateway drain",
    act: async () => {
      await post("/drain");
      return "The gateway drains. This page loses its connection when it stops.";
    },
  });
}

function test() {
  confirmAction({
    title: "Send a test notice",
    words: "Each receiver gets one test notice.",
    button: "Send",
    command: "vllm-gateway notices test",
    act: async () => {
      const { results } = await post("/admin/v1/notices/test");
      return el(
        "ul",
        { className: "sentences" },
        ...results.map((each) =>
          el(
            "li",
            {},
            stateMark(each.accepted ? "ready" : "failed", each.accepted ? "Accepted" : "Refused"),
            ` ${each.name}: ${each.result}`,
          ),
        ),
      );
    },
  });
}

start(() => {
  $("drain").onclick = () => load(async () => (await show(), drain()));
  $("test").onclick = test;
  $("api").ontoggle = () => $("api").open && !$("routes").firstChild && load(showRoutes);
  return refresh(5, show);
});
