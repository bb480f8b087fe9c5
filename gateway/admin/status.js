"use strict";
const EVERY = 2000;
const keyed = (root) => new Map([...root.querySelectorAll("details")].map((one) => [one.dataset.key, one]));
// A part with unchanged markup is not replaced, so that a selection in it is not lost.
function takeOver(next) {
  document.title = next.title;
  const open = keyed(document), places = new Map([...open].map(([key, one]) => [key, place(one)]));
  for (const [key, one] of keyed(next)) if (open.has(key)) one.open = open.get(key).open;
  const now = [...document.querySelectorAll("[data-part]")], then = [...next.querySelectorAll("[data-part]")];
  if (now.map((one) => one.dataset.part).join() !== then.map((one) => one.dataset.part).join())
    document.querySelector("main").replaceWith(next.querySelector("main"));
  else now.forEach((one, at) => { if (one.outerHTML !== then[at].outerHTML) one.replaceWith(then[at]); });
  for (const [key, one] of keyed(document)) scroll(one, places.get(key));
}
// A log is shown from its end, and stays where the reader has scrolled.
function place(one) {
  const log = one.querySelector("pre");
  return one.open && log.scrollTop + log.clientHeight < log.scrollHeight - 4 ? log.scrollTop : undefined;
}
function scroll(one, top) {
  const log = one.querySelector("pre");
  log.scrollTop = top ?? log.scrollHeight;
}
document.addEventListener("toggle", (event) => { if (event.target.open) scroll(event.target); }, true);
async function update() {
  try {
    const response = await fetch(location.pathname, { headers: { accept: "text/html" }, cache: "no-store" });
    takeOver(new DOMParser().parseFromString(await response.text(), "text/html"));
    document.body.classList.remove("silent");
  } catch {
    document.body.classList.add("silent");
  }
  setTimeout(update, EVERY);
}
for (const one of keyed(document).values()) scroll(one);
setTimeout(update, EVERY);
