const PEOPLE = "/admin/v1/people",
  PAGE = 200;
const personName = (person) => person.name || person.subject;

function endSessions(person) {
  confirmAction({
    title: `End all sessions of ${personName(person)}`,
    words: `${person.sessions === 1 ? "1 session ends" : `${number(person.sessions)} sessions end`} on both ports and on all gateways. The keys of the person stay valid. The person can sign in again: to prevent that, remove the person at the identity provider.`,
    button: "End all sessions",
    danger: true,
    command: `vllm-gateway people sign-out ${shellText(person.subject)}${person.issuer ? ` --issuer ${shellText(person.issuer)}` : ""}`,
    act: async () => {
      const { ended } = await api(`${PEOPLE}/${encodeURIComponent(person.id)}/sessions`, { method: "DELETE" });
      await showPeople();
      return `${number(ended)} ${ended === 1 ? "session" : "sessions"} of ${personName(person)} ended.`;
    },
  });
}

const COLUMNS = [
  {
    title: "Person",
    value: (person) =>
      el(
        "span",
        { title: person.subject },
        personName(person),
        person.name && person.name !== person.subject ? el("small", { className: "quiet" }, ` ${person.subject}`) : "",
      ),
  },
  { title: "Signs in with", value: (person) => el("span", { title: person.issuer }, person.issuer || "a link") },
  { title: "Role", value: (person) => person.role ?? "none" },
  {
    title: "Teams",
    value: (person) => {
      const text = person.teams.map((team) => (person.owned_teams.includes(team) ? `${team} (owner)` : team)).join(", ");
      return text ? el("span", { title: text }, text) : null;
    },
  },
  { title: "Last sign-in", value: (person) => ago(person.last_sign_in) },
  {
    title: "Sessions",
    value: (person) => {
      if (!person.sessions) return "0";
      const end = el(
        "button",
        { type: "button", className: "plain error", "aria-label": `End all sessions of ${personName(person)}` },
        "End all",
      );
      end.addEventListener("click", () => endSessions(person));
      return [`${number(person.sessions)} `, end];
    },
  },
];

async function showPeople() {
  const subject = $("subject").value.trim();
  history.replaceState(null, "", location.pathname + query({ subject }));
  const { show } = pagedTable("People", COLUMNS, [17, 14, 7, 15, 9, 9], {
    nouns: ["person", "people"],
    empty: () =>
      subject
        ? "No person has this subject."
        : "No person has signed in yet. Create a sign-in link, or let people sign in with your identity provider.",
    async fetchRows(cursor) {
      const page = await api(`${PEOPLE}${query({ subject, limit: PAGE, cursor })}`);
      return [page.people, page.next_cursor];
    },
  });
  await show($("people"));
}

function createLink() {
  const user = el("input", { required: true, autocomplete: "off", placeholder: "carol" }),
    role = el("select", {}, ...["", ...RANKS].map((each) => el("option", { value: each }, each || "none: the portal only"))),
    teams = el("input", { placeholder: "none", autocomplete: "off" }),
    owned = el("input", { placeholder: "none", autocomplete: "off" });
  const several = (name, text) => words(text).map((each) => [name, each]);
  const values = () => [
    ["user", user.value.trim()],
    ...(role.value ? [["role", role.value]] : []),
    ...several("team", teams.value),
    ...several("owned_team", owned.value),
  ];
  confirmAction({
    title: "Create a sign-in link",
    words: "The link signs a person in once, without a password. Send it to that person only.",
    button: "Create the link",
    fields: [
      field("Name of the person", user),
      field("Role in this console", role),
      field("Teams", teams, "Separated by commas."),
      field("Teams that the person owns", owned, "Owners manage the keys of their teams."),
    ],
    command: () =>
      `vllm-gateway login-link ${values()
        .map(([name, value]) => `--${name.replace("_", "-")} ${shellText(value)}`)
        .join(" ")}`,
    act: async () => {
      const { urls, expires_in } = await post(`/admin/v1/sign-in-links?${new URLSearchParams(values())}`);
      return el(
        "div",
        {},
        el("p", {}, `The link works once, within ${duration(expires_in)}. Choose the address:`),
        ...urls.map((url) => codeBlock(url)),
        el("p", { className: "quiet" }, "Copy it now. It is not shown again."),
      );
    },
  });
}

start(async () => {
  if (!may("admin")) {
    $("count").textContent = "People are shown to admins only. This page needs the role admin.";
    return;
  }
  $("subject").value = new URLSearchParams(location.search).get("subject") ?? "";
  $("create").onclick = createLink;
  onFilter(200, showPeople);
  if (document.body.dataset.signsIn) {
    await showPeople();
    $("filters").hidden = $("create").hidden = false;
    return;
  }
  $("count").textContent = "Sign-in is not set up. To set it up:";
  $("people").replaceChildren(
    el("p", {}, "1. Create a key next to gateway.yaml:"),
    codeBlock("openssl rand -base64 48 > session.key\nchmod 600 session.key\n"),
    el("p", {}, "2. Add this to gateway.yaml, with the URL of your gateway, and restart the gateway:"),
    codeBlock("# gateway.yaml\nstore: sqlite:///keys.db\nsign_in:\n  key: {file: session.key}\n  url: https://llm.example.com\n"),
  );
});
