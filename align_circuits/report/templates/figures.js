// Unpacks the libraries and then the drawings, in the order of the page: as they are, plotly alone has 4.8 MB.
const run = code => {
  const script = document.createElement("script");
  script.textContent = code;
  document.body.append(script);
  script.remove();
};
const unpacked = async text => {
  const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
};
// On a phone the panels of a figure stand one below the other, and the scale of its colours below them.
const stacked = layout => {
  const {t = 100, b = 80} = layout.margin ?? {}, inner = (layout.height ?? 450) - t - b, gap = 100;
  const panels = Object.keys(layout).filter(name => /^xaxis\d*$/.test(name)).map(name => {
    const [x, y] = [layout[name], layout[name.replace("x", "y")]];
    const {domain: [left, right] = [0, 1]} = x, {domain: [bottom, top] = [0, 1]} = y;
    const title = layout.annotations?.find(it => it.xref === "paper" && it.yref === "paper"
      && Math.abs(it.x - (left + right) / 2) < .01 && Math.abs(it.y - top) < .01);
    return {x, y, title, height: (top - bottom) * inner};
  });
  const total = panels.reduce((sum, {height}) => sum + height + gap, -gap);
  let top = total;
  for (const {x, y, title, height} of panels) {
    if (title) Object.assign(title, {x: .5, y: top / total});
    x.domain = [0, 1];
    y.domain = [Math.max(0, top - height) / total, top / total];
    if (panels.length > 1) y.showticklabels = true;
    top -= height + gap;
  }
  layout.height = total + t + b;
  if (layout.legend) Object.assign(layout.legend, {y: layout.legend.y * inner / total, font: {size: 11}});
  const bar = layout.coloraxis?.colorbar;
  if (bar) Object.assign(bar, {orientation: "h", x: 0, xanchor: "left", y: -60 / total, yanchor: "top", len: 1,
    lenmode: "fraction", thickness: 14});
  return layout;
};
const narrow = innerWidth < 640;
new MutationObserver(() => {
  for (const canvas of document.querySelectorAll("canvas:not([aria-label])"))
    canvas.setAttribute("aria-label", canvas.closest("[aria-label]")?.getAttribute("aria-label") ?? "");
}).observe(document.querySelector("main"), {childList: true, subtree: true});
(async () => {
  let draw;
  for (const packed of document.querySelectorAll("script[type='text/gzip']")) {
    run(await unpacked(packed.textContent));
    if (narrow && !draw && (draw = window.Plotly?.newPlot))
      Plotly.newPlot = (id, data, layout, config) => {
        document.getElementById(id).parentElement.style.height = `${stacked(layout).height}px`;
        for (const map of data) if (map.z?.[0]?.length > 60) map.xgap = 0; // or the gaps hide the cells
        return draw(id, data, layout, config);
      };
  }
  // Before the next frame, as in a picture of the page; plotly's own answer to another width comes a little later.
  const resized = new ResizeObserver(entries => {
    for (const {target, contentRect} of entries) {
      const drawn = target.querySelector(".main-svg").getBoundingClientRect();
      if (!target.layout.width && Math.abs(drawn.width - contentRect.width) > 1)
        Plotly.relayout(target, {autosize: true});
    }
  });
  for (const figure of document.querySelectorAll(".plotly-graph-div")) resized.observe(figure);
})().catch(error => {
  const note = document.createElement("p");
  note.setAttribute("role", "alert");
  note.textContent = `No figures: this browser cannot unpack them (${error}). Take one of 2023 or later.`;
  document.querySelector("main").prepend(note);
});
