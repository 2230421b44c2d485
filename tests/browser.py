"""Opens pages in headless Chromium, without a network, for tests that look at what a reader sees."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

# Looks at the page when it has settled, and writes down what it saw.
PROBE = """<script>setTimeout(() => {
  const blue = canvas => {
    const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    let seen = 0;
    for (let i = 0; i < data.length; i += 4) seen += data[i + 3] > 0 && data[i + 2] > data[i] + 60;
    return 4 * seen / data.length;
  };
  const figures = [...document.querySelectorAll(".plotly-graph-div")];
  const marks = ".main-svg .heatmaplayer image, .main-svg .scatterlayer .point";
  const seen = document.createElement("pre");
  seen.id = "seen";
  seen.textContent = JSON.stringify({
    figures: figures.length, drawn: figures.filter(figure => figure.querySelector(marks)).length,
    canvases: [...document.querySelectorAll(".attention canvas")].map(blue),
    overflows: document.documentElement.scrollWidth > innerWidth,
  });
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


def opened(page: Path, folder: Path) -> Seen:
    """Opens a copy of a page with the probe in it."""
    copy = folder / f"probed-{page.name}"
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE), encoding="utf-8")
    command = [
        chromium(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1100,1400",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--no-first-run",
        "--disable-background-networking",
        f"--user-data-dir={folder / 'profile'}",
        "--enable-logging=stderr",
        "--virtual-time-budget=10000",
        "--dump-dom",
        copy.as_uri(),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    seen = re.search(r'<pre id="seen">(.*?)</pre>', ran.stdout)
    assert seen, f"the page did not run to its end: {ran.stderr[-2000:]}"
    console = [line for line in ran.stderr.splitlines() if ":CONSOLE" in line]
    return Seen(**json.loads(seen[1]), console=console)
