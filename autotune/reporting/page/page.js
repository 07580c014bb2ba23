"use strict";
// Reads values off charts and moves the before/after slider. Text goes in as text, never as markup.
const SVG = "http://www.w3.org/2000/svg";
for (const plot of document.querySelectorAll(".plot")) {
  const points = JSON.parse(plot.dataset.points);
  const readout = plot.closest("figure").querySelector(".readout");
  const cursor = plot.querySelector(".cursor");
  let current = -1;
  const show = (index) => {
    current = index;
    const [x, y, text] = points[index];
    readout.textContent = text;
    const ring = document.createElementNS(SVG, "circle");
    for (const [name, value] of [["cx", `${x}%`], ["cy", `${y}%`], ["r", "13"]]) ring.setAttribute(name, value);
    cursor.replaceChildren(ring);
  };
  const nearest = (event) => {
    const box = plot.getBoundingClientRect();
    const left = event.clientX - box.left, top = event.clientY - box.top;
    const far = ([x, y]) => Math.hypot((x / 100) * box.width - left, ((y / 100) * box.height - top) * 0.6);
    return points.reduce((best, point, index) => (far(point) < far(points[best]) ? index : best), 0);
  };
  if (!points.length) continue;
  plot.addEventListener("pointermove", (event) => show(nearest(event)));
  plot.addEventListener("pointerdown", (event) => show(nearest(event)));
  const order = points.map((_, index) => index).sort((a, b) => points[a][0] - points[b][0]);
  plot.addEventListener("keydown", (event) => {
    const at = order.indexOf(current);
    const to = { ArrowRight: at + 1, ArrowLeft: at < 0 ? order.length - 1 : at - 1, Home: 0, End: order.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    show(order[Math.min(order.length - 1, Math.max(0, to))]);
  });
}
for (const slider of document.querySelectorAll(".slider input")) {
  const both = slider.closest(".slider").querySelector(".both");
  slider.addEventListener("input", () => both.style.setProperty("--share", `${slider.value}%`));
}
