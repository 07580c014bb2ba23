// Draws the charts, reads values off them, and moves the before/after slider. Text goes in as text, never as markup.
const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;" };
const asLabel = (text) => text.replace(/(.{1,36})(\s|$)/g, "$1\n").trim().replace(/[&<>]/g, (c) => ESCAPES[c]).replaceAll("\n", "<br>");
const isTouched = matchMedia("(pointer: coarse)").matches; // there a drag scrolls the page
function enliven(root) {
  for (const plot of root.querySelectorAll(".plot")) {
    if (plot.redraw) continue; // drawn already
    const drawing = plot.firstElementChild;
    const readout = plot.closest("figure").querySelector(".readout");
    let order, current = -1;
    const draw = () => {
      const colors = getComputedStyle(document.documentElement);
      const { data, layout } = JSON.parse(plot.dataset.figure, (_, value) => (/^--\w+$/.test(value) ? colors.getPropertyValue(value) : value));
      for (const trace of data) trace.hovertext = trace.customdata?.map(asLabel);
      order = data.flatMap(({ x, customdata = [] }, curveNumber) => customdata.map((text, pointNumber) => ({ curveNumber, pointNumber, x: x[pointNumber], text })));
      order.sort((a, b) => a.x - b.x);
      Object.assign(layout, { width: plot.clientWidth, height: plot.clientHeight, dragmode: isTouched ? false : "zoom" });
      Plotly.react(drawing, data, layout, { displayModeBar: false });
    };
    plot.redraw = () => plot.clientWidth && draw();
    new ResizeObserver(() => {
      if (!plot.clientWidth) return; // in what is folded
      const isDrawn = drawing.on;
      draw();
      if (isDrawn) return;
      drawing.on("plotly_hover", ({ points: [point] }) => {
        readout.textContent = point.customdata;
        current = order.findIndex((each) => each.curveNumber === point.curveNumber && each.pointNumber === point.pointNumber);
      });
    }).observe(plot);
    for (const start of isTouched ? ["touchstart", "mousedown"] : []) {
      plot.addEventListener(start, (event) => event.stopPropagation(), { capture: true, passive: true }); // a tap only reads
    }
    plot.addEventListener("keydown", (event) => {
      const last = order.length - 1;
      const to = { ArrowRight: current + 1, ArrowLeft: current < 0 ? last : current - 1, Home: 0, End: last }[event.key];
      if (to === undefined || last < 0) return;
      event.preventDefault();
      current = Math.min(last, Math.max(0, to));
      readout.textContent = order[current].text;
      Plotly.Fx.hover(drawing, [order[current]]);
    });
  }
  for (const slider of root.querySelectorAll(".slider input")) {
    const both = slider.closest(".slider").querySelector(".both");
    slider.addEventListener("input", () => both.style.setProperty("--share", `${slider.value}%`));
  }
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.querySelectorAll(".plot").forEach((plot) => plot.redraw()));
enliven(document);
