"""Opens pages in headless Chromium, without a network, for tests that look at what a reader sees."""

import html
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# What a reader sees of a page that has settled.
LOOK = """() => {
  const blue = canvas => {
    const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    let seen = 0;
    for (let i = 0; i < data.length; i += 4) seen += data[i + 3] > 0 && data[i + 2] > data[i] + 60;
    return 4 * seen / data.length;
  };
  const figures = [...document.querySelectorAll(".plotly-graph-div")];
  const marks = ".main-svg .heatmaplayer image, .main-svg .scatterlayer .point";
  return {
    figures: figures.length, drawn: figures.filter(figure => figure.querySelector(marks)).length,
    canvases: [...document.querySelectorAll(".attention canvas")].map(blue),
    overflows: document.documentElement.scrollWidth > innerWidth,
  };
}"""

# Writes down what a function returns.
PROBE = """<script>setTimeout(async () => {
  const returned = JSON.stringify(await (FUNCTION)());
  const seen = document.createElement("pre");
  seen.id = "seen";
  seen.textContent = returned;
  document.body.append(seen);
}, 3000)</script></body>"""


@dataclass(frozen=True)
class Seen:
    """What a reader of a page would see."""

    figures: int
    drawn: int
    """The figures with at least one mark in them."""
    canvases: list[float]
    """The share of each attention map that is blue."""
    overflows: bool
    """Whether the page is wider than the window."""
    console: list[str]


def chromium() -> str:
    """Chromium's path; without one the test is skipped, but never in CI."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        assert not os.environ.get("CI"), "CI needs a browser: apt-get install chromium"
        pytest.skip("no chromium on this machine: apt-get install chromium")
    return path


def opened(page: Path, folder: Path, width: int = 1100) -> Seen:
    """What a reader sees of a page."""
    seen, console = ran(page, folder, LOOK, width=width)
    return Seen(**seen, console=console)


def ran(page: Path, folder: Path, function: str, budget_ms: int = 10_000, width: int = 1100) -> tuple[Any, list[str]]:
    """Opens a copy of a page; returns what a JavaScript function returns there, and the lines on the console."""
    copy = folder / f"probed-{page.name}"
    text = page.read_text(encoding="utf-8").replace("</body>", PROBE.replace("FUNCTION", function))
    copy.write_text(text, encoding="utf-8")
    command = [
        chromium(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--window-size={width},1400",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--no-first-run",
        "--disable-background-networking",
        f"--user-data-dir={folder / 'profile'}",
        "--enable-logging=stderr",
        f"--virtual-time-budget={budget_ms}",
        "--dump-dom",
        copy.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    seen = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert seen, f"the page did not run to its end: {done.stderr[-2000:]}"
    return json.loads(html.unescape(seen[1])), [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
