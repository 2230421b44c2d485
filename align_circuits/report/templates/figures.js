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
new MutationObserver(() => {
  for (const canvas of document.querySelectorAll("canvas:not([aria-label])"))
    canvas.setAttribute("aria-label", canvas.closest("[aria-label]")?.getAttribute("aria-label") ?? "");
}).observe(document.querySelector("main"), {childList: true, subtree: true});
(async () => {
  for (const packed of document.querySelectorAll("script[type='text/gzip']")) run(await unpacked(packed.textContent));
})().catch(error => {
  const note = document.createElement("p");
  note.setAttribute("role", "alert");
  note.textContent = `No figures: this browser cannot unpack them (${error}). Take one of 2023 or later.`;
  document.querySelector("main").prepend(note);
});
