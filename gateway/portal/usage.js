async function showLimits() {
  const { limits } = await api("/v1/limits");
  $("limits").replaceChildren(
    limits.length
      ? el("ul", { className: "limits" }, ...limits.map(limitBar))
      : el("p", { className: "quiet" }, "No limit applies to this key."),
  );
}

let shown = [];
async function showUsage() {
  const by = $("usage-by").value,
    since = new Date(Date.now() - 86400000 * (Number($("usage-days").value) - 1)).toISOString().slice(0, 10);
  let report;
  try {
    report = await api(`/v1/usage?by=${by}&since=${since}`);
  } catch (error) {
    if (!(error instanceof ApiError) || error.status === 401) throw error;
    $("usage-csv").hidden = true;
    $("usage").replaceChildren(el("p", { className: "quiet" }, error.status === 404 ? "This gateway records no usage." : error.message));
    return;
  }
  shown = report.usage;
  $("usage-csv").hidden = !shown.length;
  if (!shown.length) {
    $("usage").replaceChildren(el("p", { className: "quiet" }, "No requests in this period."));
    return;
  }
  $("usage").replaceChildren(
    chart(by === "day" ? everyDay(shown, since) : shown.slice(0, 30), by),
    dataTable(`Usage by ${by}`, columnsBy(by), shown),
    shown.some((row) => row.cost !== null) ? el("p", { className: "quiet" }, `Costs are ${CURRENCY}.`) : "",
  );
}

start(async () => {
  for (const select of ["usage-days", "usage-by"]) $(select).onchange = () => load(showUsage);
  $("usage-csv").onclick = () => saveCsv("usage.csv", columnsBy($("usage-by").value), shown);
  await showLimits();
  await showUsage();
});
