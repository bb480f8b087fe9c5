const RANKS = ["viewer", "operator", "admin"];
let me = null;
// Whether the person may do what requires this role. A page shows no button for anything else.
const may = (role) => me.role !== null && RANKS.indexOf(me.role) >= RANKS.indexOf(role);
const start = (show) =>
  enterWith("/admin/v1/me", (known) => {
    me = known;
    $("account").textContent = [me.name || me.kind, me.role ?? `owner of ${me.teams.join(", ")}`].join(" · ");
    return show();
  });
// An action: a route without a body.
const post = (path, json) => api(path, { method: "POST", ...(json === undefined ? {} : { json }) });
// Query parameters without the empty ones.
const query = (values) => {
  const kept = Object.entries(values).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return kept.length ? `?${new URLSearchParams(kept)}` : "";
};
// A text as one word of a shell.
const shellText = (text) => (/^[\w@%+=:,./-][\w@%+=:,./#-]*$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`);
