"""Makes the README's pictures anew: `python docs/images/make.py` (Chromium photographs the prompt)."""

import subprocess
import tempfile
from pathlib import Path

import align_circuits as ac

HERE = Path(__file__).parent


def photograph(html: str, name: str, width: int, height: int) -> None:
    """Saves a page as a picture, with two pixels for each of its own."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(f'<meta charset="utf-8"><body style="background:white">{html}', encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=2"]
        picture = [f"--window-size={width},{height}", f"--screenshot={HERE / name}"]
        subprocess.run(["chromium", *options, *picture, page.as_uri()], check=True, capture_output=True, timeout=60)


def main() -> None:
    task = ac.Seq2SeqTask(x_len=4, phrase_len=2, n_examples=4)
    model = ac.planted_circuit(task, seed=0)
    photograph(task.sample(1, model.tokenizer, seed=5)[0]._repr_html_(), "prompt.png", 330, 150)


if __name__ == "__main__":
    main()
