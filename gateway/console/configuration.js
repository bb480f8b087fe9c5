let preview = null;
const sentences = (texts) => texts.map((text) => el("li", {}, text)); // they begin with names of settings

// What happens to launched servers, in sentences.
function effects({ restarts, starts, stops }) {
  const each = (models, say) => Object.entries(models).map(([model, servers]) => say(model, plural(servers, "server")));
  return [
    ...each(restarts, (model, servers) => `${servers} of ${model} will be restarted, one after the other; open streams are drained first`),
    ...each(starts, (model, servers) => `${servers} of ${model} will be started`),
    ...each(stops, (model, servers) => `${servers} of ${model} will be drained and stopped`),
  ];
}

function showVerdict() {
  const { problems, changes, needs_restart } = preview;
  const said = problems.length
    ? `The file has ${plural(problems.length, "problem")}, so it is rejected. The previous configuration stays in use.`
    : changes.length
      ? `The file differs from the configuration in use: ${plural(changes.length, "change")}.`
      : needs_restart.length
        ? `The file is in use, except for ${plural(needs_restart.length, "setting")} that ${needs_restart.length === 1 ? "needs" : "need"} a restart.`
        : "The file is valid, and all of it is in use.";
  $("verdict").dataset.status = problems.length ? "not_ready" : changes.length || needs_restart.length ? "degraded" : "ready";
  $("headline").textContent = said;
  $("problems").replaceChildren(
    ...problems.map((problem) =>
      el(
        "li",
        {},
        el("code", {}, problem.line ? `${problem.file}:${problem.line}` : problem.file),
        problem.path ? el("span", {}, " ", el("code", {}, problem.path)) : null,
        ` ${problem.message}`,
      ),
    ),
  );
}

const side = (row, name) => (name in row ? el("code", {}, JSON.stringify(row[name])) : el("span", { className: "quiet" }, "not set"));
const COLUMNS = [
  { title: "Setting", value: (row) => el("code", {}, row.path) },
  { title: "In use", value: (row) => side(row, "loaded") },
  { title: "In the file", value: (row) => side(row, "file") },
];

async function show() {
  preview = await api("/admin/v1/configuration");
  const { files, applied, by, last, changes, needs_restart, values } = preview;
  const said = effects(preview);
  showVerdict();
  $("loaded").replaceChildren(
    ...[
      [files.length > 1 ? "Files" : "File", el("span", {}, ...files.map((file) => el("code", { className: "line" }, file)))],
      ["Read", when(applied)],
      ["By", by === null ? "The start of the gateway" : capital(by)],
    ].flatMap(([title, value]) => [el("dt", {}, title), el("dd", {}, value)]),
  );
  $("difference").hidden = !(changes.length || values?.length);
  $("difference").querySelector("h2").textContent = changes.length ? "What a reload would do" : "What differs";
  $("effects").replaceChildren(
    changes.length ? el("ul", { className: "sentences" }, ...sentences(changes)) : "",
    changes.length
      ? el(
          "p",
          { className: said.length ? "" : "quiet" },
          said.length ? el("strong", {}, `${said.join(". ")}.`) : "No server is restarted.",
        )
      : "",
  );
  $("values").replaceChildren(
    values?.length ? dataTable("Settings that differ", COLUMNS, values) : "",
    values === undefined && changes.length ? el("p", { className: "quiet" }, "The values need the role operator.") : "",
  );
  $("restart").hidden = !needs_restart.length;
  $("needs-restart").replaceChildren(...sentences(needs_restart));
  const texts = last.successful ? (last.changes.length ? last.changes : (last.earlier?.changes ?? [])) : last.problems;
  $("last").replaceChildren(
    el("p", {}, stateMark(last.successful ? "ready" : "failed", last.successful ? "Applied" : "Rejected"), " ", when(last.when)),
    texts.length
      ? el("ul", { className: "sentences" }, ...sentences(texts))
      : el("p", { className: "quiet" }, "Nothing has changed since the start of the gateway."),
  );
  $("reload").hidden = !may("operator");
}

function confirmReload() {
  const { problems, changes } = preview;
  const said = [...changes, ...effects(preview)];
  const words = problems.length
    ? "The file has problems and would be rejected. Nothing would change."
    : said.length
      ? `This applies ${plural(changes.length, "change")}.`
      : "The file is the same as the configuration in use, so nothing would change.";
  confirmAction({
    title: "Reload the configuration",
    words,
    fields: said.length ? [el("ul", { className: "sentences" }, ...sentences(said))] : [],
    button: "Reload",
    command: "vllm-gateway reload",
    act: async () => {
      const result = await post("/reload");
      await show();
      if (!result.successful) throw new Error(`Rejected: ${result.problems.join("\n")}`);
      return result.changes.length ? `Applied: ${result.changes.join("; ")}` : "Nothing has changed.";
    },
  });
}

start(() => {
  $("check").onclick = () => load(async () => (await show(), toast("The file was read again.")));
  $("reload").onclick = () => load(async () => (await show(), confirmReload()));
  return refresh(10, show);
});
