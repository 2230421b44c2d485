"""Tokens as HTML, for notebooks and reports."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

GROUP_COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999")
"""Okabe and Ito (2008): distinct for colour-blind readers."""
_DARK = ("#0072B2",)  # white letters are easier to read on it


@dataclass(frozen=True)
class Mark:
    """How one token is drawn."""

    text: str
    group: int | None = None
    """Tokens of one group share a colour and a number; None for a token of no group."""
    framed: bool = False
    """Whether the token is framed, as a target or a key."""
    weight: float | None = None
    """The attention to the token, in [0, 1]: drawn as a shade in place of the group, with its number."""
    query: bool = False
    """Whether the attention comes from this token."""

    @property
    def shaded(self) -> bool:
        """Whether the attention is large enough to be drawn."""
        return self.weight is not None and round(self.weight, 2) > 0


CAPTION = "opacity:.7;font-family:sans-serif;font-size:12px;white-space:normal"
"""The style of what stands below tokens: lines of tokens scroll, those of a sentence break."""


class Html(str):
    """HTML that a notebook renders."""

    def _repr_html_(self) -> str:
        return str(self)


def draw_tokens(lines: Sequence[Sequence[Mark]], caption: str = "") -> Html:
    """Returns the lines as one HTML block that reads on light and on dark pages.

    Groups and attention have a number as well as a colour; attention below one hundredth is left blank.
    """
    body = "".join(f"<div>{''.join(map(_span, line))}</div>" for line in lines)
    note = f'<div style="{CAPTION}">{html.escape(caption)}</div>' if caption else ""
    style = "font-family:monospace;line-height:1.9;overflow-x:auto;white-space:nowrap;padding:3px"
    return Html(f'<div style="{style}">{body}{note}</div>')


def readable(text: str) -> str:
    """Returns a token's text with a line break as ↵, without spaces, and a space alone as ␣."""
    return text.replace("\n", "↵").replace(" ", "") or "␣"


def _span(mark: Mark) -> str:
    text = html.escape(readable(mark.text))
    if mark.weight is not None:
        return _attended(mark, text, mark.weight)
    if mark.group is None:
        return f'<span style="padding:1px 3px;opacity:.75">{text}</span>'
    colour = GROUP_COLOURS[mark.group % len(GROUP_COLOURS)]
    ink = "#fff" if colour in _DARK else "#000"
    style = f"padding:1px 3px;border-radius:3px;color:{ink};background:{colour}"
    frame = "outline:2px solid;" if mark.framed else ""  # in the page's own text colour
    inner = f'<span style="{style}">{text}<sub style="font-size:9px">{mark.group + 1}</sub></span>'
    return f'<span style="margin:1px;border-radius:3px;{frame}">{inner}</span>'


def _attended(mark: Mark, text: str, weight: float) -> str:
    """A token with its attention as shade and number, in an orange frame if it is a key."""
    frame = "outline:2px solid #E69F00;" if mark.framed else ""
    frame += "border-bottom:3px double currentColor;font-weight:bold;" if mark.query else ""
    style = f"padding:1px 3px;margin:1px;{frame}"
    if not mark.shaded:
        return f'<span style="{style}">{text}</span>'
    # Mixed with white, not with the page: black letters have contrast on it in light and in dark.
    red, green, blue = (round(255 + weight * (full - 255)) for full in (0, 114, 178))
    shade = f"border-radius:3px;background:rgb({red},{green},{blue});color:{'#000' if weight < 0.95 else '#fff'};"
    return f'<span style="{style}{shade}">{text}<sub style="font-size:9px">{f"{weight:.2f}".lstrip("0")}</sub></span>'
