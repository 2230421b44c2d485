"""What is clipped, overlaps or overflows on the pages of the documentation, in headless Chromium.

Every built page is opened at the width of a desk and of a phone. What a reader could not read is printed; the exit
status is 1 if there is anything.

    python tests/pages.py [docs/_build/html] [--only results]
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from browser import ran

WIDTHS = (1400, 412)

# Two pixels are rounding. What scrolls on its own, or is not shown, is not clipped.
FAULTS = """() => {
  const found = [], width = document.documentElement.clientWidth;
  const named = each => `${each.tagName.toLowerCase()} "${(each.textContent || "").trim().slice(0, 50)}"`;
  const above = each => each ? [each, ...above(each.parentElement)] : [];
  const scrolls = each => above(each.parentElement).some(
    parent => parent !== document.body && ["auto", "scroll"].includes(getComputedStyle(parent).overflowX));
  const unseen = each => above(each).some(parent => {
    const style = getComputedStyle(parent);
    return style.display === "none" || style.visibility === "hidden" || style.opacity === "0";
  });
  const box = each => each.getBoundingClientRect();
  const overlap = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4;

  if (document.documentElement.scrollWidth > width + 2) found.push("the page scrolls sideways");
  for (const each of document.querySelectorAll("article *")) {
    if (each.closest("svg") || !box(each).width || unseen(each)) continue;
    if (box(each).right > width + 2 && !scrolls(each)) found.push(`over the edge: ${named(each)}`);
    const hides = ["hidden", "clip"].includes(getComputedStyle(each).overflowX);
    if (hides && each.scrollWidth > each.clientWidth + 2) found.push(`clipped: ${named(each)}`);
  }
  for (const table of document.querySelectorAll("article table:not(.domainindex-table, .genindextable)"))
    if (!table.querySelector("th")) found.push(`a table without a header: ${named(table)}`);
  for (const figure of document.querySelectorAll(".js-plotly-plot")) {
    const texts = [...figure.querySelectorAll(
      ":is(.gtitle, .xtitle, .x2title, .x3title, .ytitle, .legendtext, .annotation-text)")];
    const shown = texts.filter(text => box(text).width);
    const bars = [...figure.querySelectorAll(".modebar-group")].filter(bar => box(bar).width && !unseen(bar));
    shown.forEach((text, place) => {
      for (const other of [...shown.slice(place + 1), ...bars])
        if (overlap(box(text), box(other))) found.push(`overlap: ${named(text)} and ${named(other)}`);
    });
    const whole = box(figure);
    for (const text of figure.querySelectorAll(".main-svg text")) {
      const own = box(text), beyond = Math.max(
        whole.left - own.left, own.right - whole.right, whole.top - own.top, own.bottom - whole.bottom);
      if (own.width && beyond > 4) found.push(`outside its figure: ${named(text)}`);
    }
  }
  return found;
}"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("html", type=Path, nargs="?", default=Path("docs/_build/html"))
    parser.add_argument("--only", default="", help="pages whose path has this in it")
    arguments = parser.parse_args()
    pages = sorted(page.relative_to(arguments.html) for page in arguments.html.rglob("*.html"))
    pages = [page for page in pages if page.parts[0] != "_modules" and arguments.only in str(page)]
    if not pages:
        print(f"no page in {arguments.html}: make docs")
        return 2
    faults = 0
    with tempfile.TemporaryDirectory() as name:
        # A page finds its styles and scripts beside it.
        folder = Path(name) / "html"
        shutil.copytree(arguments.html, folder, ignore=shutil.ignore_patterns("_modules", "_sources"))
        for page in pages:
            for width in WIDTHS:
                found, _ = ran(folder / page, (folder / page).parent, FAULTS, budget_ms=15_000, width=width)
                faults += len(found)
                for fault in dict.fromkeys(found):
                    print(f"{page} at {width}: {fault}", flush=True)
    print(f"{len(pages)} pages at {' and '.join(map(str, WIDTHS))} pixels: {faults or 'no'} faults")
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main())
