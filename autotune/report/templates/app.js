// The served page: live parts that keep what one looks at, files that are dropped, commands to copy.
const charted = (root) => [...root.querySelectorAll("figure:has(> .plot)")].map((figure) => [figure.closest("section")?.querySelector("h3")?.textContent, figure]);
async function refresh(part) {
  const focused = document.activeElement;
  if (part.contains(focused) && focused.matches("input, textarea, select")) return; // someone compares or writes
  const answer = await fetch(part.dataset.part, { headers: { "HX-Request": "true" } });
  if (!answer.ok) return;
  const next = document.createElement("div");
  next.innerHTML = await answer.text(); // made by our templates, which escape; the policy runs no script in it
  const open = new Set([...part.querySelectorAll("details[open] > summary")].map((each) => each.textContent));
  for (const each of next.querySelectorAll("details > summary")) each.parentElement.open ||= open.has(each.textContent);
  const old = new Map(charted(part));
  for (const [name, figure] of charted(next)) {
    const kept = old.get(name);
    if (!kept) continue; // a drawn chart stays, with new data
    kept.querySelector("figcaption").textContent = figure.querySelector("figcaption").textContent;
    kept.querySelector(".plot").dataset.figure = figure.querySelector(".plot").dataset.figure;
    figure.replaceWith(kept);
  }
  part.replaceChildren(...next.childNodes);
  if (part.contains(focused)) focused.focus({ preventScroll: true });
  for (const plot of part.querySelectorAll(".plot")) plot.redraw?.();
  enliven(part);
  htmx.process(part);
}
for (const part of document.querySelectorAll("[data-stream]")) {
  const source = new EventSource(part.dataset.stream);
  let isBusy = false, isDue = false;
  const update = async () => {
    isDue = isBusy;
    if (isBusy) return;
    isBusy = true;
    await refresh(part).catch(() => {});
    setTimeout(() => { isBusy = false; if (isDue) update(); }, 1500);
  };
  source.onmessage = update;
  source.addEventListener("over", () => { source.close(); update(); });
  addEventListener("pagehide", () => source.close());
}
async function upload(form, files) {
  const told = form.querySelector("[role=status]");
  const folder = form.elements.folder.value, failed = [];
  const asText = (page) => [...new DOMParser().parseFromString(page, "text/html").querySelectorAll("p")].map((each) => each.textContent).join("; ");
  for (const file of files) {
    told.textContent = `uploading ${file.name}`;
    const answer = await fetch(`/upload?${new URLSearchParams({ folder, name: file.name })}`, { method: "PUT", body: file }).catch(() => null);
    if (!answer?.ok) failed.push(`${file.name}: ${answer ? asText(await answer.text()) : "it was not sent; folders cannot be"}`);
  }
  told.textContent = `${files.length - failed.length} uploaded. ${failed.join(" ")}`;
  if (!failed.length) location.href = `${form.dataset.then}${encodeURIComponent(folder)}&file=${encodeURIComponent(files[files.length - 1].name)}`;
}
addEventListener("submit", (event) => {
  if (!event.target.matches(".upload")) return;
  event.preventDefault();
  upload(event.target, event.target.elements.files.files);
});
addEventListener("dragover", (event) => { if (event.dataTransfer.types.includes("Files")) event.preventDefault(); });
addEventListener("drop", (event) => { // wherever it lands: a browser would leave the page and open it
  const form = document.querySelector("form.upload"), panel = form?.closest("details");
  if (!event.dataTransfer.types.includes("Files")) return;
  event.preventDefault();
  if (panel) panel.open = true;
  if (form) upload(form, event.dataTransfer.files);
});
document.addEventListener("change", ({ target }) => { if (target.matches("[data-submits]")) target.form.requestSubmit(); });
document.addEventListener("click", async ({ target }) => {
  const button = target.closest("[data-copy]");
  if (!button) return;
  await navigator.clipboard.writeText(button.parentElement.querySelector("code").textContent);
  button.textContent = "copied";
});
