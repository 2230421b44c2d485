"""The figure that the functions of `plots` return: one of plotly's, which pages made of a notebook show as well."""

from typing import Any

import plotly.graph_objects as go
import plotly.io as pio

NUMBERS_ALONE = ("plotly_mimetype", "jupyterlab", "nteract", "vscode")
"""plotly's renderers that hand a notebook the numbers of a figure and nothing to draw them with."""

_carrier: list[Any] = []
"""The cell of this kernel whose output has plotly's script, and the number of its run; empty before the first."""


class Figure(go.Figure):
    """A plotly figure that nbconvert shows as well, and so does whatever else knows no plotly, all offline.

    By default plotly hands a notebook the numbers of a figure alone. JupyterLab and VS Code draw them; nbconvert leaves
    a blank. Here HTML that draws itself goes with them. The first figure of a kernel has plotly's script (4.8 MB) for
    all. A renderer of your choice (`plotly.io.renderers.default`, or PLOTLY_RENDERER in the environment) is taken as it
    is: `"png"` keeps a notebook small, and GitHub shows its pictures.
    """

    def _ipython_display_(self) -> None:
        if pio.renderers.render_on_display and pio.renderers.default:
            self.show()
        else:
            super()._ipython_display_()

    def show(self, *args: Any, **kwargs: Any) -> None:
        """Shows the figure, as plotly's `show` does and with its arguments."""
        if args or kwargs or pio.renderers.default not in NUMBERS_ALONE:
            super().show(*args, **kwargs)
            return
        from IPython.display import display

        page = {"full_html": False, "include_mathjax": False, "config": {"responsive": True}}
        html = self.to_html(include_plotlyjs=_has_script(), **page)
        display({**self._repr_mimebundle_(), "text/html": html}, raw=True)


def _has_script() -> bool:
    """Whether what this cell shows has plotly's script: it is the first to show a figure, or that one run again."""
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    cell, run = shell.get_parent().get("metadata", {}).get("cellId"), shell.execution_count
    due = not _carrier or (cell is not None and cell == _carrier[0] and run != _carrier[1])
    if due:
        _carrier[:] = cell, run
    return due
