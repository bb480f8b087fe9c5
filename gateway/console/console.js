const RANKS = ["viewer", "operator", "admin"];
let me = null;
// Whether the person may do what requires this role. A page shows no button for anything else.
const may = (role) => me.role !== null && RANKS.indexOf(me.role) >= RANKS.indexOf(role);
const ME = "/admin/v1/me";
function start(show) {
  const open = enterWith(ME, (known) => {
    me = known;
    $("account").textContent = [me.name || me.kind, me.role ?? `owner of ${me.teams.join(", ")}`].join(" · ");
    return show();
  });
  // A person whose session has ended may have signed in again in another tab.
  window.onfocus = async () => {
    if (document.body.dataset.signsIn && !$("enter").hidden && (await request(ME).catch(() => null))?.ok) open();
  };
}
// The time of what a page shows. While the gateway does not respond, it is not live.
const liveAt = (seconds) => [el("span", { className: "live" }, "Live · "), when(seconds)];
// An action: a route without a body.
const post = (path, json) => api(path, { method: "POST", ...(json === undefined ? {} : { json }) });
// Query parameters without the empty ones.
const query = (values) => {
  const kept = Object.entries(values).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return kept.length ? `?${new URLSearchParams(kept)}` : "";
};
// A text as one word of a shell.
const shellText = (text) => (/^[\w@%+=:,./-][\w@%+=:,./#-]*$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`);
