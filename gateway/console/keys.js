const KEYS = "/admin/v1/keys",
  PAGE = 200;
const pathOf = (id) => `${KEYS}/${encodeURIComponent(id)}`;
// Admins change every key of the store, and owners those of their teams.
const manages = (key) => key.stored && (may("admin") || me.teams.includes(key.team));
const COLORS = { valid: "up", "no key": "up", "ends soon": "starting", expired: "stopped", revoked: "revoked" };
const keyState = (key) => stateMark(COLORS[key.state] ?? "stopped", key.state);
const maker = (key) => (!key.stored ? "gateway.yaml" : key.made_by ? `${key.made_by.subject}, for themselves` : "an operator");

const COLUMNS = [
  {
    title: "Key",
    value: (key) =>
      el(
        "span",
        { title: key.name ? `${key.id} (${key.name})` : key.id },
        keyLink(key.id),
        key.name ? el("small", { className: "quiet" }, ` ${key.name}`) : "",
      ),
  },
  { title: "State", value: keyState },
  { title: "Team", value: (key) => teamLink(key.team) },
  { title: "Stored in", value: (key) => (key.stored ? "store" : "gateway.yaml") },
  { title: "Models", value: (key) => oneLine(key.models.join(", ") === "*" ? "all" : key.models.join(", ")) },
  { title: "Limits", value: (key) => oneLine(brief(key.limits)) },
  { title: "Expires", value: (key) => date(key.expires) },
  { title: "Last used", value: (key) => ago(key.last_used) },
];
const WIDE = [9.2, 6.2, 6.4, 8, 5.1, 14.6, 6, 6.5];

// The keys of the file are few, and searched here. The keys of the store come in pages, and the gateway searches them.
const NO_STORE = "All keys are in gateway.yaml. To create, change and revoke keys on this page, add a store to gateway.yaml and restart:";
let files = null,
  hasStore = true;
async function fileKeys() {
  if (files === null) files = me.role === null ? [] : (await api("/keys")).keys.map((key) => ({ ...key, stored: false }));
  return files;
}
function matches(key) {
  const text = $("search").value.trim().toLowerCase(),
    team = $("team").value.trim();
  return (!team || key.team === team) && (!text || [key.id, key.team ?? ""].some((each) => each.toLowerCase().includes(text)));
}

async function showKeys() {
  const source = $("source").value,
    filter = { search: $("search").value.trim(), team: $("team").value.trim() };
  history.replaceState(null, "", location.pathname + query({ ...filter, source }));
  const { table, isNewest, show } = pagedTable("Keys", COLUMNS, WIDE, {
    first: hasStore && source !== "file" ? "" : null,
    nouns: ["key", "keys"],
    empty: () =>
      filter.search || filter.team ? "No key matches. Search by a part of its ID, its name or its team." : "There are no keys yet.",
    async fetchRows(cursor) {
      const page = await storePage(`${KEYS}${query({ ...filter, limit: PAGE, cursor })}`, NO_STORE);
      hasStore = page !== null;
      if (!hasStore) return [[], null];
      if (page.last_use_unknown && page.keys.length) table.node.title = `The last use is unknown: ${page.last_use_unknown}`;
      return [page.keys.map((key) => ({ ...key, stored: true })), page.next_cursor];
    },
  });
  const found = source === "store" ? [] : (await fileKeys()).filter(matches);
  if (isNewest()) await show($("keys"), found);
}

async function showClosest() {
  if (me.role === null) {
    $("closest-part").hidden = true;
    return;
  }
  const { limits } = await api("/limits?closest=5"),
    inFile = new Set((await fileKeys()).map((key) => key.id));
  const columns = [
    { title: "Key or team", value: ({ kind, id }) => [kind === "team" ? "team " : "", link(`/console/${kind}s${query({ id })}`, id)] },
    {
      title: "Limit",
      value: (limit) =>
        `${capital(nameOf(limit.limit))}${limit.models ? ` for ${limit.models.join(", ")}` : ""}${limit.soft ? " (only warns)" : ""}`,
    },
    { title: "Used", value: usedBar },
    { title: "Resets in", value: (limit) => (limit.reset_seconds > 0 ? duration(Math.max(limit.reset_seconds, 1)) : null) },
    {
      title: "Actions",
      number: true,
      value: ({ kind, id, holder }) => {
        const buttons = [];
        const button = (text, act, className = "plain") => {
          const made = el("button", { type: "button", className, "aria-label": `${text} ${id}` }, text);
          made.addEventListener("click", () => load(act));
          buttons.push(made);
        };
        if (kind === "team")
          buttons.push(link(`/console/usage${query({ by: "key", team: id, days: 1 })}`, "Show usage by key", "button plain"));
        if (may("operator"))
          button("Raise", async () => raiseLimit(`${kind}s`, id, (await api(`/limits${query({ [kind]: id })}`)).limits, showClosest));
        if (kind === "key" && may("admin") && !inFile.has(id))
          button("Revoke", async () => revoke(await readKey(id), showClosest), "plain error");
        return el("div", { className: "row tight" }, ...buttons);
      },
    },
  ];
  const rows = limits.map((limit) => {
    const [, kind, id] = /^(key|team) (\S+)/.exec(limit.holder) ?? [null, "key", limit.holder];
    return { ...limit, kind, id };
  });
  const table = rows.length
    ? dataTable("Limits with the largest used share", columns, rows)
    : el("p", { className: "quiet" }, "No limit is in use at the moment.");
  if (rows.length) table.classList.add("closest");
  $("closest").replaceChildren(table);
}

// One key

// An ID is in the file or in the store, never in both.
async function readKey(id) {
  const inFile = (await fileKeys()).find((key) => key.id === id);
  return inFile ?? { ...(await readEntry(pathOf(id))), stored: true };
}

async function showKey(id) {
  const again = () => showKey(id);
  const missing = "There is no such key in the store or in gateway.yaml. It may have been deleted.",
    key = await openEntry(() => readKey(id), "Keys", missing);
  if (key === null) return;
  const from = key.stored
    ? ["Stored in the store"]
    : ["Stored in gateway.yaml. To revoke it: ", el("code", {}, `vllm-gateway keys revoke ${shellText(id)}`)];
  $("one-state").replaceChildren(keyState(key), el("span", { className: "quiet" }, key.name ? `${key.name} · ` : "", ...from));
  const facts = [
    ["Team", teamLink(key.team) ?? "none"],
    ["Models", key.models.join(", ") === "*" ? "all" : key.models.join(", ")],
    ["Expires", day(key.expires) ?? "never"],
    ["Last used", day(key.last_used) ?? "not known"],
    ["Made by", maker(key)],
    ...(key.stored
      ? [
          ["Created", day(key.created)],
          ["Changed", day(key.changed)],
        ]
      : []),
    ["Valid secrets", key.hashes_end.length ? [`${key.hashes}; an old one ends `, day(key.hashes_end[0])] : String(key.hashes)],
    ...(Object.keys(key.labels ?? {}).length
      ? [
          [
            "Labels",
            Object.entries(key.labels)
              .map((pair) => pair.join(": "))
              .join(", "),
          ],
        ]
      : []),
  ];
  $("one-about").replaceChildren(
    factsCard(facts),
    el(
      "p",
      { className: "row" },
      link(`/console/requests${query({ key: id })}`, "Requests of this key"),
      link(`/console/usage${query({ key: id, by: "model" })}`, "Usage of this key"),
    ),
  );
  let states = [];
  await part($("limits"), async () => {
    states = (await api(`/limits${query({ key: id })}`)).limits;
    return limitBars(states, "No limit applies to this key or its team.");
  });
  await part($("raises"), async () => raisesList("keys", id, (await api(`${pathOf(id)}/raises`)).raises, again));
  $("actions").replaceChildren(...keyActions(key, states, again));
  await part($("use"), () => monthChart({ key: id }, "No requests in the last 30 days."));
}

function keyActions(key, states, again) {
  const raise =
    may("operator") && states.some((each) => each.holder === `key ${key.id}`)
      ? [actionButton("Raise a limit", () => raiseLimit("keys", key.id, states, again))]
      : [];
  if (!manages(key)) return raise;
  const ended = key.state === "revoked" || key.state === "expired";
  return [
    actionButton("Edit", () => editKey(key, states, again)),
    ...raise,
    ...(ended ? [] : [actionButton("Rotate", () => rotate(key, again))]),
    ...(key.state === "revoked"
      ? [actionButton("Restore", () => restore(key, again))]
      : [actionButton("Revoke", () => revoke(key, again), "danger")]),
    ...(ended ? [actionButton("Delete", () => remove(key), "danger")] : []),
  ];
}

function revoke(key, again) {
  confirmAction({
    title: `Revoke ${key.id}`,
    words: `${useOf(key)} New requests with the key are refused at once. Requests in flight finish. You can restore the key later.`,
    button: "Revoke the key",
    danger: true,
    command: `vllm-gateway keys revoke ${shellText(key.id)}`,
    act: async () => {
      await changeEntry(`${pathOf(key.id)}/revoke`, "POST", key.tag, again);
      await again();
      return `${key.id} is revoked.`;
    },
  });
}
const useOf = (key) => (key.last_used ? `The key was last used ${ago(key.last_used).textContent}.` : "The key has no known use.");

function restore(key, again) {
  confirmAction({
    title: `Restore ${key.id}`,
    words: "Requests with the key are accepted again.",
    button: "Restore the key",
    command: `vllm-gateway keys restore ${shellText(key.id)}`,
    act: async () => {
      await changeEntry(`${pathOf(key.id)}/restore`, "POST", key.tag, again);
      await again();
      return `${key.id} is restored.`;
    },
  });
}

function remove(key) {
  confirmAction({
    title: `Delete ${key.id}`,
    words: "The key and its settings are deleted. This cannot be undone. Its usage stays in the ledger.",
    button: "Delete the key",
    danger: true,
    command: `vllm-gateway keys delete ${shellText(key.id)}`,
    act: async () => {
      await changeEntry(pathOf(key.id), "DELETE", key.tag, () => showKey(key.id));
      location.assign("/console/keys");
    },
  });
}

// A secret, which is in one response only.
const secretOnce = (text, secret) =>
  el(
    "div",
    {},
    el("p", {}, text),
    secret === null
      ? el("p", { className: "error" }, "This was done before, and the secret was shown then. To get another secret, rotate the key.")
      : codeBlock(secret),
    el("p", { className: "quiet" }, "Copy it now. It is not shown again, and the gateway stores only its hash."),
  );

function rotate(key, again) {
  const once = onceKey();
  const overlap = el(
    "select",
    {},
    ...[
      ["0s", "0 hours: it is refused at once"],
      ["1h", "1 hour"],
      ["1d", "1 day"],
      ["7d", "7 days"],
      ["30d", "30 days"],
    ].map(([value, text]) => el("option", { value, selected: value === "7d" }, text)),
  );
  confirmAction({
    title: `Rotate ${key.id}`,
    words:
      "The key gets a new secret. Its limits and models stay the same. The old secret stays valid for a while, so that you can update clients.",
    button: "Create a new secret",
    fields: [field("The old secret stays valid for", overlap)],
    command: () => `vllm-gateway keys rotate ${shellText(key.id)} --overlap ${overlap.value}`,
    act: async () => {
      const response = await changeEntry(
        `${pathOf(key.id)}/rotate`,
        "POST",
        key.tag,
        again,
        { overlap: overlap.value },
        { "idempotency-key": once },
      );
      const { secret } = await response.json();
      await again();
      return secretOnce(`The new secret of ${key.id}:`, secret);
    },
  });
}

function editKey(key, states, again) {
  const own = states.filter((each) => each.holder === `key ${key.id}`);
  const inputs = {
    name: el("input", { value: key.name ?? "", maxLength: 100 }),
    team: el("input", { value: key.team ?? "", disabled: !may("admin") }),
    models: el("input", { value: key.models.join(", ") }),
    expires: el("input", { value: key.expires ?? "", placeholder: "never" }),
  };
  const limits = limitsForm(key.limits, own);
  const patch = () => {
    const found = {},
      text = (name) => inputs[name].value.trim() || null;
    for (const name of ["name", "team", "expires"]) if (text(name) !== (key[name] ?? null)) found[name] = text(name);
    const models = words(inputs.models.value);
    if (models.join() !== key.models.join()) found.models = models.length ? models : null;
    const changed = limits.patch();
    return changed === undefined ? found : { ...found, limits: changed };
  };
  confirmAction({
    title: `Edit ${key.id}`,
    button: "Save",
    fields: [
      field("Name", inputs.name, "A description, shown in lists."),
      field("Team", inputs.team),
      field("Models", inputs.models, "IDs, or patterns with *, separated by commas. * is all models."),
      field("Expires", inputs.expires, "A date such as 2027-01-31, which means 00:00 UTC. Empty: never."),
      limits.node,
    ],
    command: () => `vllm-gateway keys set ${shellText(key.id)}${limits.options() || " …"}`,
    act: async () => {
      const json = patch();
      if (!Object.keys(json).length) return "Nothing was changed.";
      await changeEntry(pathOf(key.id), "PATCH", key.tag, again, json);
      await again();
      return `${key.id} is saved. Its next requests have the new settings.`;
    },
  });
}

function createKey() {
  const admin = may("admin"),
    once = onceKey();
  const id = el("input", { required: admin, pattern: "\\S+", title: "Without spaces", placeholder: "alice" }),
    name = el("input", { maxLength: 100, placeholder: "Alice's laptop" }),
    team = admin
      ? el("input", { placeholder: "none", value: $("team").value })
      : el("select", {}, ...me.teams.map((each) => el("option", {}, each))),
    models = el("input", { value: admin ? "*" : "" }),
    expires = el("input", { placeholder: "never" });
  const limits = limitsForm({});
  confirmAction({
    title: "Create a key",
    button: "Create the key",
    fields: [
      ...(admin ? [field("ID", id, "It appears in usage, limits and metrics, and cannot be changed.")] : []),
      field("Name", name, "A description, shown in lists."),
      field("Team", team),
      field("Models", models, "IDs, or patterns with *, separated by commas."),
      field("Expires", expires, "A date such as 2027-01-31, which means 00:00 UTC. Empty: never."),
      limits.node,
    ],
    command: () =>
      `vllm-gateway keys new --id ${shellText(id.value || "ID")}${team.value ? ` --team ${shellText(team.value)}` : ""}${limits.options()}`,
    act: async () => {
      const chosen = words(models.value);
      const fields = { id: id.value.trim(), name: name.value.trim(), team: team.value.trim(), expires: expires.value.trim() };
      const json = Object.fromEntries(Object.entries(fields).filter(([, value]) => value));
      if (chosen.length) json.models = chosen;
      const changed = limits.patch();
      if (changed) json.limits = changed;
      const made = await api(KEYS, { method: "POST", headers: { "idempotency-key": once }, json });
      await showKeys();
      return el("div", {}, secretOnce(`The secret of ${made.id}:`, made.secret), el("p", {}, keyLink(made.id, `Open ${made.id}`)));
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
    return showKey(id);
  }
  for (const name of ["search", "team", "source"]) $(name).value = given.get(name) ?? "";
  $("create").hidden = !(may("admin") || me.teams.length);
  $("create").onclick = createKey;
  onFilter(120, showKeys);
  await showKeys();
  await refresh(30, showClosest);
});
