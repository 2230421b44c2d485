"""Tokens as HTML, for notebooks and reports."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

GROUP_COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999")
"""Okabe and Ito (2008), which colour-blind people can tell apart."""


@dataclass(frozen=True)
class Mark:
    """How one token is drawn."""

    text: str
    group: int | None = None
    """Tokens of one group share a colour and a number; None for a token of no group."""
    strong: bool = False
    """Whether the token is framed, as what is predicted or looked at."""


def draw_tokens(lines: Sequence[Sequence[Mark]], caption: str = "") -> str:
    """Returns the lines as one HTML block that reads on light and on dark pages.

    A group is told by its number as well as by its colour.
    """
    body = "".join(f"<div>{''.join(map(_span, line))}</div>" for line in lines)
    note = (
        f'<div style="opacity:.7;font-family:sans-serif;font-size:12px">{html.escape(caption)}</div>' if caption else ""
    )
    return f'<div style="font-family:monospace;line-height:1.9;overflow-x:auto;white-space:nowrap">{body}{note}</div>'


def _span(mark: Mark) -> str:
    text = html.escape(mark.text.replace("\n", "↵")).replace(" ", "") or "␣"
    if mark.group is None:
        return f'<span style="padding:1px 3px;opacity:.75">{text}</span>'
    colour = GROUP_COLOURS[mark.group % len(GROUP_COLOURS)]
    frame = "outline:2px solid currentColor;" if mark.strong else ""
    style = f"padding:1px 3px;margin:1px;border-radius:3px;color:#000;background:{colour};{frame}"
    return f'<span style="{style}">{text}<sub style="font-size:9px">{mark.group + 1}</sub></span>'
