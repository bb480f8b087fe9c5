const MINE = "/portal/v1/keys";
const STATES = { valid: "ready", "ends soon": "starting", expired: "stopped", revoked: "revoked" };
const OVERLAPS = ["1h", "1d", "7d", "30d"];
const time = (text) => (text ? when(Date.parse(text) / 1000) : null);
const send = async (path, method, json) => checked(await request(path, { method, ...(json ? { json } : {}) }));
const choice = (values, chosen) => el("select", {}, ...values.map((value) => el("option", { selected: value === chosen }, value)));

function explain(...words) {
  $("keys-note").replaceChildren(...words);
  $("keys").replaceChildren();
  $("create").hidden = $("policies").hidden = true;
}

// A key that is shown once. Requests to models need a key, so this tab can take it.
function newKey({ secret }, words) {
  const use = el("button", { type: "button", className: "primary" }, "Use it in this tab");
  use.addEventListener("click", () => {
    sessionStorage.setItem(KEY, secret);
    location.assign("/portal/playground");
  });
  return el("div", {}, el("p", {}, words), codeBlock(secret), el("div", { className: "row" }, use));
}

// Inputs for limits of a key, which are at most the ceilings of the team.
function limitInputs() {
  const inputs = AMOUNTS.map((name) => el("input", { inputMode: "decimal", autocomplete: "off", name })),
    fields = inputs.map((input, at) => field(capital(nameOf(AMOUNTS[at])), input, unitOf(AMOUNTS[at])));
  const show = ({ self_service: { limits } }) =>
    inputs.forEach((input) => {
      const ceiling = limits?.[input.name];
      input.placeholder = ceiling === undefined ? "no limit" : `at most ${amount(Number(ceiling))}`;
    });
  const chosen = () => Object.fromEntries(inputs.filter((input) => input.value.trim()).map((input) => [input.name, numberIn(input)]));
  return { node: el("details", {}, el("summary", {}, "Limits of this key"), el("div", { className: "amounts" }, ...fields)), show, chosen };
}
function numberIn(input) {
  const value = Number(input.value.replaceAll(/[,_\s]/g, ""));
  if (Number.isNaN(value)) throw new Error(`${capital(nameOf(input.name))}: expected a number.`);
  return value;
}

function create(teams) {
  const name = el("input", { required: true, maxLength: 100, autocomplete: "off" }),
    team = choice(teams.map((one) => one.id)),
    models = el("input", { autocomplete: "off", placeholder: "all that the team allows" }),
    days = el("input", { type: "number", min: 1, placeholder: "as long as the team allows" }),
    limits = limitInputs();
  const showCeilings = () => limits.show(teams.find((one) => one.id === team.value));
  team.addEventListener("change", showCeilings);
  showCeilings();
  confirmAction({
    title: "Create a key",
    words: "The key belongs to you: its usage has your name.",
    button: "Create",
    fields: [
      field("Name", name, "What will use it, for example “Laptop”."),
      ...(teams.length > 1 ? [field("Team", team)] : []),
      field("Models", models, "Names or patterns, separated by commas."),
      field("Valid for days", days),
      limits.node,
    ],
    act: async () => {
      const chosen = models.value
        .split(",")
        .map((one) => one.trim())
        .filter(Boolean);
      const limited = limits.chosen();
      const made = await api(MINE, {
        method: "POST",
        json: {
          team: team.value,
          name: name.value.trim(),
          ...(chosen.length ? { models: chosen } : {}),
          ...(Object.keys(limited).length ? { limits: limited } : {}),
          ...(days.value ? { expires: new Date(Date.now() + 86400000 * Number(days.value)).toISOString() } : {}),
        },
      });
      await showKeys();
      return newKey(made, "Copy the key now. It is not shown again.");
    },
  });
}

function rotate(key) {
  const overlap = choice(OVERLAPS, "7d");
  confirmAction({
    title: `Rotate ${key.name ?? key.id}`,
    words: "You get a new secret for the same key. The old one stays valid for a while, so that you can update your programs.",
    button: "Rotate",
    fields: [field("The old secret stays valid for", overlap)],
    act: async () => {
      const made = await api(`${MINE}/${key.id}/rotate`, { method: "POST", json: { overlap: overlap.value } });
      await showKeys();
      return newKey(made, `Copy the new secret now. It is not shown again. The old one stays valid for ${overlap.value}.`);
    },
  });
}

function rename(key) {
  const name = el("input", { value: key.name ?? "", required: true, maxLength: 100, autocomplete: "off" });
  confirmAction({
    title: `Rename ${key.name ?? key.id}`,
    words: "",
    button: "Rename",
    fields: [field("Name", name)],
    act: async () => {
      await send(`${MINE}/${key.id}`, "PATCH", { name: name.value.trim() });
      await showKeys();
      return "The key is renamed.";
    },
  });
}

function revoke(key) {
  confirmAction({
    title: `Revoke ${key.name ?? key.id}`,
    words: "New requests with the key are refused at once. You cannot restore it.",
    button: "Revoke",
    danger: true,
    act: async () => {
      await send(`${MINE}/${key.id}/revoke`, "POST");
      await showKeys();
      return "The key is revoked.";
    },
  });
}

function remove(key) {
  confirmAction({
    title: `Delete ${key.name ?? key.id}`,
    words: "The key disappears from this list. Its usage stays with the operator.",
    button: "Delete",
    danger: true,
    act: async () => {
      await send(`${MINE}/${key.id}`, "DELETE");
      await showKeys();
      return "The key is deleted.";
    },
  });
}

function actions(key) {
  const isDead = key.state === "revoked" || key.state === "expired";
  const buttons = [
    ["Rename", rename],
    ...(isDead
      ? [["Delete", remove]]
      : [
          ["Rotate", rotate],
          ["Revoke", revoke],
        ]),
  ];
  return el(
    "div",
    { className: "row nowrap" },
    ...buttons.map(([title, act]) => {
      const button = el("button", { type: "button", className: "plain", "aria-label": `${title} ${key.name ?? key.id}` }, title);
      button.addEventListener("click", () => act(key));
      return button;
    }),
  );
}

const COLUMNS = [
  { title: "Name", value: (key) => [key.name ?? key.id, el("br"), el("code", { className: "quiet" }, key.id)] },
  { title: "State", value: (key) => stateMark(STATES[key.state] ?? "stopped", key.state) },
  { title: "Team", value: (key) => key.team },
  { title: "Models", value: (key) => key.models.join(", ") },
  { title: "Limits", value: (key) => brief(key.limits) },
  { title: "Expires", value: (key) => time(key.expires) ?? "never" },
  { title: "Last used", value: (key) => time(key.last_used) ?? "not yet" },
  { title: "Actions", value: actions },
];

async function allKeys() {
  const found = [];
  for (let cursor = ""; cursor !== null;) {
    const page = await api(`${MINE}?limit=100${cursor ? `&cursor=${encodeURIComponent(cursor)}` : ""}`);
    found.push(...page.keys);
    cursor = page.next_cursor;
  }
  return found;
}

async function showKeys() {
  const keys = await allKeys();
  const valid = keys.filter((key) => STATES[key.state] === "ready" || STATES[key.state] === "starting");
  $("keys-note").textContent = keys.length
    ? `You have ${valid.length === 1 ? "one valid key" : `${valid.length} valid keys`}.`
    : "You have no keys yet. A program needs one for each request.";
  $("keys").replaceChildren(...(keys.length ? [dataTable("Your keys", COLUMNS, keys)] : []));
}

function policyOf({ self_service: policy }) {
  if (!policy) return "The operator of the gateway creates its keys.";
  const limits = Object.entries(policy.limits ?? {}).filter(([, value]) => typeof value === "number");
  return [
    `at most ${policy.max_keys === 1 ? "one valid key" : `${policy.max_keys} valid keys`}`,
    policy.max_lifetime ? `each for ${policy.max_lifetime}` : "",
    policy.models?.length ? `for ${policy.models.join(", ")}` : "",
    ...limits.map(([name, value]) => limited(name, amount(value))),
  ]
    .filter(Boolean)
    .join(" · ");
}

takeFragment();
$("page").hidden = false;
$("leave").hidden = !sessionStorage.getItem(KEY);
$("leave").onclick = () => {
  sessionStorage.removeItem(KEY);
  $("leave").hidden = true;
};
let isSignedIn = false;
async function showPage() {
  const was = isSignedIn;
  isSignedIn = await showPerson();
  if (!isSignedIn) {
    const signIn = el("a", { className: "button primary", href: "/sign-in?return_to=/portal/keys" }, "Sign in");
    explain(was ? "Your session has ended. " : "", signIn, " to see and create your keys.");
    return;
  }
  if (was) return;
  const { teams } = await api("/portal/v1/me"),
    open = teams.filter((team) => team.self_service);
  $("create").hidden = !open.length;
  $("create").onclick = () => create(open);
  await showKeys();
  if (!open.length) $("keys-note").append(" The operator of the gateway creates the keys of your teams.");
  $("policies").hidden = !teams.length;
  $("policy-list").replaceChildren(...teams.flatMap((team) => [el("dt", {}, team.id), el("dd", {}, policyOf(team))]));
}
if (document.body.dataset.signsIn) {
  load(showPage);
  // The session may have ended meanwhile, or the person may have signed in again in another tab.
  window.onfocus = () => load(showPage);
} else explain("Sign-in is not set up on this gateway, so its operator creates the keys. The other pages work with your key.");
