"""Figures as static pictures."""

from importlib.util import find_spec
from pathlib import Path

import plotly.graph_objects as go

from align_circuits.jobs.files import replacing
from align_circuits.report.attention_view import AttentionView
from align_circuits.report.plots.attention_figures import attention_maps


def save(figure: go.Figure | AttentionView, path: str | Path, *, width: int = 1000, scale: int = 2) -> Path:
    """Writes a figure as a static picture, offline.

    Args:
        figure: A figure, or an attention view, which is drawn as `attention_maps`.
        path: Ends in `.png`, `.svg` or `.pdf`.
        width: In pixels; the height is the figure's own.
        scale: Pixels of a PNG for each pixel of the figure.

    Returns:
        The path.

    Raises:
        ValueError: Another ending, or kaleido or its browser is missing.
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"cannot write a picture to {path.name!r}: give a name that ends in .png, .svg or .pdf")
    if find_spec("kaleido") is None:
        raise ValueError("pictures need the package kaleido: pip install 'align-circuits[pictures]'")
    import kaleido
    from kaleido.errors import ChromeNotFoundError

    drawn = attention_maps(figure) if isinstance(figure, AttentionView) else figure
    options = {"format": path.suffix[1:], "width": width, "height": drawn.layout["height"] or 450, "scale": scale}
    try:
        picture = kaleido.calc_fig_sync(drawn, opts=options, kopts={"mathjax": False})  # MathJax would be downloaded
    except ChromeNotFoundError as error:
        raise ValueError(
            "pictures are drawn with Chrome or Chromium, and none was found: install one (apt-get install chromium), "
            "or name it in the environment variable BROWSER_PATH"
        ) from error
    with replacing(path) as temporary:
        temporary.write_bytes(picture)
    return path
