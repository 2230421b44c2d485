// Sorts a table by the column whose heading is pressed, by mouse or keyboard; missing values stay last.
for (const head of document.querySelectorAll("thead th")) {
  const button = document.createElement("button");
  button.append(...head.childNodes);
  head.append(button);
  button.addEventListener("click", () => {
    const sign = head.ariaSort === "ascending" ? -1 : 1;
    const body = head.closest("table").tBodies[0];
    const text = row => row.cells[head.cellIndex].textContent.trim();
    const missing = row => ["", "–", "NaN", "<NA>"].includes(text(row));
    const compare = (a, b) => {
      const [x, y] = [parseFloat(text(a)), parseFloat(text(b))];
      return isNaN(x) || isNaN(y) ? text(a).localeCompare(text(b), "en", {numeric: true}) : x - y;
    };
    const rows = [...body.rows].sort((a, b) => missing(a) - missing(b) || sign * compare(a, b));
    for (const other of head.parentNode.cells) other.ariaSort = null;
    head.ariaSort = sign > 0 ? "ascending" : "descending";
    body.append(...rows);
  });
}
