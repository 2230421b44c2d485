"""Tokens as HTML, for notebooks and reports, and how the package fills its templates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from align_circuits.jobs.control_characters import printable

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
    differs: bool = False
    """Whether the token is another one in the prompt beside it."""

    @property
    def shaded(self) -> bool:
        """Whether the attention is large enough to be drawn."""
        return self.weight is not None and round(self.weight, 2) > 0

    @property
    def number(self) -> str:
        """What stands beside the token: its attention or its group."""
        return str((self.group or 0) + 1) if self.weight is None else f"{self.weight:.2f}".lstrip("0")

    @property
    def colour(self) -> str:
        """The colour behind the token."""
        if self.weight is None:
            return GROUP_COLOURS[(self.group or 0) % len(GROUP_COLOURS)]
        # Mixed with white, not with the page: black letters have contrast on it in light and in dark.
        return "rgb({},{},{})".format(*(round(255 + self.weight * (full - 255)) for full in (0, 114, 178)))

    @property
    def ink(self) -> str:
        """The colour of the token's letters."""
        return "#fff" if self.colour in _DARK or (self.weight or 0) >= 0.95 else "#000"


class Html(str):
    """HTML that a notebook renders, and that a template takes as it is; control characters in it are escaped."""

    def __new__(cls, text: str) -> "Html":  # noqa: D102
        return super().__new__(cls, printable(text))

    def _repr_html_(self) -> str:
        return str(self)

    def __html__(self) -> Markup:
        return Markup(str(self))


def rendered(template: str, **values: Any) -> Html:
    """Returns a template of the package, such as "report/templates/page.html", filled with values.

    Every value but `Html` is drawn letter for letter.
    """
    return Html(_TEMPLATES.get_template(template).render(values))


def draw_tokens(lines: Sequence[Sequence[Mark]], caption: str = "") -> Html:
    """Returns the lines as one HTML block that reads on light and on dark pages.

    Groups and attention have a number as well as a colour; attention below one hundredth is left blank.
    """
    return rendered("prompts/tokens.html", lines=lines, caption=caption)


def readable(text: str) -> str:
    """Returns a token's text with a line break as ↵, a space alone as ␣, no others, and control characters escaped."""
    return printable(text).replace("\n", "↵").replace(" ", "") or "␣"


def several(count: int, noun: str) -> str:
    """Returns a number and a noun, in the plural unless there is one."""
    return f"{count} {noun}{'s' * (count != 1)}"


_TEMPLATES = Environment(
    loader=PackageLoader("align_circuits", ""),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters["readable"] = readable
# Without spaces: pages of attention are mostly numbers.
_TEMPLATES.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
