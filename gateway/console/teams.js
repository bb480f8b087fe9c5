const TEAMS = "/admin/v1/teams",
  PAGE = 200;
const pathOf = (id) => `${TEAMS}/${encodeURIComponent(id)}`;
const policyText = (policy) =>
  policy
    ? `up to ${number(policy.max_keys)} keys for each person${policy.max_lifetime ? `, for at most ${policy.max_lifetime}` : ""}, models: ${(policy.models ?? ["*"]).join(", ")}`
    : "off";

// A team is compared with one without a weight, so that the number has a meaning.
const shareText = (weight) => (weight === 1 ? "weight 1, as by default" : `weight ${amount(weight)}, ${amount(weight)} times the default`);

let closest = new Map();
const COLUMNS = [
  { title: "Team", value: (team) => el("span", { title: team.id }, teamLink(team.id)) },
  { title: "Stored in", value: (team) => (team.stored ? "store" : "gateway.yaml") },
  { title: "Keys", number: true, value: (team) => link(`/console/keys${query({ team: team.id })}`, number(team.keys)) },
  { title: "Closest limit", value: (team) => (closest.has(team.id) ? usedBar(closest.get(team.id), true) : null) },
  { title: "Limits", value: (team) => oneLine(brief(team.limits)) },
  { title: "Self-service", value: (team) => oneLine(policyText(team.self_service)) },
];

const fileTeams = async () => (me.role === null ? [] : (await api("/teams")).teams);

const NO_STORE = "All teams are in gateway.yaml. To create and change teams on this page, add a store to gateway.yaml and restart:";
async function showTeams() {
  const search = $("search").value.trim();
  history.replaceState(null, "", location.pathname + query({ search }));
  const { isNewest, show } = pagedTable("Teams", COLUMNS, [10.6, 8.7, 4.2, 14.6, 12.4, 12], {
    nouns: ["team", "teams"],
    empty: () => (search ? "No team matches." : "There are no teams yet. The keys of a team share its limits."),
    async fetchRows(cursor) {
      const page = await storePage(`${TEAMS}${query({ search, limit: PAGE, cursor })}`, NO_STORE);
      return page === null ? [[], null] : [page.teams.map((team) => ({ ...team, stored: true })), page.next_cursor];
    },
  });
  if (me.role !== null) {
    const { limits } = await api("/limits?closest=999");
    closest = new Map();
    for (const limit of limits) {
      const id = /^team (\S+)/.exec(limit.holder)?.[1];
      if (id && !closest.has(id)) closest.set(id, limit);
    }
  }
  const found = (await fileTeams()).filter(({ id }) => id.toLowerCase().includes(search.toLowerCase()));
  if (isNewest())
    await show(
      $("teams"),
      found.map((team) => ({ ...team, stored: false })),
    );
}

async function readTeam(id) {
  const inFile = (await fileTeams()).find((each) => each.id === id);
  return inFile ? { ...inFile, stored: false } : { ...(await readEntry(pathOf(id))), stored: true };
}

async function showTeam(id) {
  const again = () => showTeam(id);
  const team = await openEntry(() => readTeam(id), "Teams", "There is no such team in the store or in gateway.yaml.");
  if (team === null) return;
  const facts = team.stored
    ? [
        ["Stored in", "the store"],
        ["Share in queues", shareText(team.weight)],
        ["Self-service", policyText(team.self_service)],
        ["Created", day(team.created)],
        ["Changed", day(team.changed)],
      ]
    : [
        ["Stored in", "gateway.yaml: edit it there"],
        ["Share in queues", shareText(team.weight)],
        ["Self-service", policyText(team.self_service)],
        ["Keys", number(team.keys)],
      ];
  $("one-about").replaceChildren(
    factsCard(facts),
    el(
      "p",
      { className: "row" },
      link(`/console/keys${query({ team: id })}`, "Keys of this team"),
      link(`/console/usage${query({ team: id, by: "key" })}`, "Usage by key"),
    ),
  );
  let states = [],
    hasKeys = true;
  await part($("limits"), async () => {
    try {
      states = (await api(`/limits${query({ team: id })}`)).limits;
    } catch (error) {
      if (error.status !== 400) throw error; // no key belongs to it yet
      hasKeys = false;
      return el("p", { className: "quiet" }, `The team has no keys yet. Its limits: ${brief(team.limits)}.`);
    }
    return limitBars(states, "Its keys share no limit.");
  });
  await part($("raises"), async () => raisesList("teams", id, hasKeys ? (await api(`${pathOf(id)}/raises`)).raises : [], again));
  $("actions").replaceChildren(
    ...(team.stored && may("admin") ? [actionButton("Edit", () => editTeam(team, states, again))] : []),
    ...(may("operator") && states.length ? [actionButton("Raise a limit", () => raiseLimit("teams", id, states, again))] : []),
    ...(team.stored && may("admin") ? [actionButton("Delete", () => removeTeam(team), "danger")] : []),
  );
  await part($("who"), async () => {
    const { usage } = await api(`/usage${query({ by: "key", team: id, since: "today" })}`);
    if (!usage.length) return el("p", { className: "quiet" }, "No requests today.");
    const all = usage.reduce((total, row) => total + row.prompt_tokens + row.completion_tokens, 0);
    return dataTable(
      "Keys of the team",
      [
        { title: "Key", value: (row) => keyLink(row.key) },
        {
          title: "Share of the team",
          value: (row) => {
            const share = (row.prompt_tokens + row.completion_tokens) / (all || 1);
            return [
              el("progress", { max: 1, value: share, "aria-label": `${Math.round(100 * share)}%` }),
              el("small", { className: "quiet" }, `${Math.round(100 * share)}%`),
            ];
          },
        },
        { title: "Requests", number: true, value: (row) => number(row.requests) },
        { title: "Tokens", number: true, value: (row) => number(row.prompt_tokens + row.completion_tokens) },
        { title: "Cost", number: true, note: capital(CURRENCY), value: (row) => (row.cost === null ? null : amount(row.cost)) },
      ],
      usage.slice(0, 20),
    );
  });
  await part($("use"), () => monthChart({ team: id }, "No requests in the last 30 days."));
}

// The inputs of a team: its limits, and what its people may create for themselves.
function teamForm(team, states = []) {
  const policy = team.self_service ?? null,
    limits = limitsForm(team.limits ?? {}, states, "Limits shared by all keys"),
    before = team.weight ?? 1,
    share = el("input", { inputMode: "decimal", autocomplete: "off", value: String(before) }),
    allowed = el("input", { type: "checkbox", checked: policy !== null }),
    most = el("input", { inputMode: "numeric", value: policy?.max_keys ?? 5 }),
    lifetime = el("input", { value: policy?.max_lifetime ?? "", placeholder: "no limit" }),
    models = el("input", { value: (policy?.models ?? ["*"]).join(", ") }),
    ceilings = limitsForm(policy?.limits ?? {}, [], "Ceilings of each key");
  const details = el(
    "div",
    { hidden: policy === null },
    field("Valid keys of each person, at most", most),
    field("Longest lifetime of a key", lifetime, "A duration such as 90d. Empty: keys may never expire."),
    field("Models", models, "IDs, or patterns with *, separated by commas."),
    ceilings.node,
  );
  allowed.addEventListener("change", () => (details.hidden = !allowed.checked));
  const selfService = () => {
    if (!allowed.checked) return policy === null ? undefined : null;
    const chosen = { max_keys: Number(most.value), max_lifetime: lifetime.value.trim() || null, models: words(models.value) },
      changed = ceilings.patch(),
      same =
        policy !== null &&
        chosen.max_keys === policy.max_keys &&
        chosen.max_lifetime === (policy.max_lifetime ?? null) &&
        chosen.models.join() === (policy.models ?? ["*"]).join();
    if (same && changed === undefined) return undefined;
    if (!chosen.models.length) delete chosen.models;
    return changed === undefined ? chosen : { ...chosen, limits: changed };
  };
  const node = el(
    "fieldset",
    {},
    el("legend", {}, "Self-service"),
    el("label", { className: "row" }, el("span", { className: "check" }, allowed), "People of the team may create keys for themselves"),
    details,
  );
  const weight = () => {
    const value = share.value.trim() ? Number(share.value) : 1;
    if (!(value > 0)) throw new Error("Weight: expected a number above 0.");
    return value === before ? undefined : value;
  };
  const patch = () => {
    const found = { limits: limits.patch(), weight: weight(), self_service: selfService() };
    return Object.fromEntries(Object.entries(found).filter(([, value]) => value !== undefined));
  };
  const options = () =>
    `${share.value.trim() && Number(share.value) !== before ? ` --weight ${share.value.trim()}` : ""}${limits.options()}`;
  const help = "With a weight of 2, the team gets twice the share of a team with 1 while both wait. Its keys divide the share.";
  return { fields: [limits.node, field("Weight in queues", share, help), node], patch, options };
}

function editTeam(team, states, again) {
  const form = teamForm(team, states);
  confirmAction({
    title: `Edit ${team.id}`,
    words: "All keys of the team share these limits. A change of self-service applies to keys that are created or changed later.",
    button: "Save",
    fields: form.fields,
    command: () => `vllm-gateway teams set ${shellText(team.id)}${form.options() || " …"}`,
    act: async () => {
      const json = form.patch();
      if (!Object.keys(json).length) return "Nothing was changed.";
      await changeEntry(pathOf(team.id), "PATCH", team.tag, again, json);
      await again();
      return `${team.id} is saved.`;
    },
  });
}

function createTeam() {
  const once = onceKey(),
    id = el("input", { required: true, pattern: "\\S+", title: "Without spaces", placeholder: "research" }),
    form = teamForm({});
  confirmAction({
    title: "Create a team",
    button: "Create the team",
    fields: [field("ID", id, "It appears in usage and limits, and cannot be changed."), ...form.fields],
    command: () => `vllm-gateway teams new --id ${shellText(id.value || "ID")}${form.options()}`,
    act: async () => {
      const made = await api(TEAMS, {
        method: "POST",
        headers: { "idempotency-key": once },
        json: { id: id.value.trim(), ...withoutNull(form.patch()) },
      });
      location.assign(`/console/teams${query({ id: made.id })}`);
    },
  });
}
const withoutNull = (value) =>
  value !== null && typeof value === "object" && !Array.isArray(value)
    ? Object.fromEntries(
        Object.entries(value)
          .filter(([, each]) => each !== null)
          .map(([name, each]) => [name, withoutNull(each)]),
      )
    : value;

function removeTeam(team) {
  confirmAction({
    title: `Delete ${team.id}`,
    words: "A team that has keys cannot be deleted: first delete its keys or move them to another team. Its usage stays in the ledger.",
    button: "Delete the team",
    danger: true,
    command: `vllm-gateway teams delete ${shellText(team.id)}`,
    act: async () => {
      await changeEntry(pathOf(team.id), "DELETE", team.tag, () => showTeam(team.id));
      location.assign("/console/teams");
    },
  });
}

start(async () => {
  const given = new URLSearchParams(location.search),
    id = given.get("id");
  $("list").hidden = id !== null;
  $("one").hidden = id === null;
  if (id !== null) {
    $("one-title").textContent = id;
    return showTeam(id);
  }
  $("search").value = given.get("search") ?? "";
  $("create").hidden = !may("admin");
  $("create").onclick = createTeam;
  onFilter(120, showTeams);
  await showTeams();
});
