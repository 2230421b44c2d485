"""The colours and symbols of all figures: legible on light and on dark pages and by colour-blind readers."""

SEQUENTIAL = "Cividis"
"""The scale for values in [0, 1]; made for colour-blind readers (Nuñez et al., 2018)."""

DIVERGING = "PuOr"
"""The scale for differences; its ends differ in hue and its middle is pale (Brewer, 2003)."""

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
"""Okabe and Ito (2008), without black and yellow, which vanish on dark and light pages."""

SYMBOLS = ("circle", "x", "triangle-down", "triangle-up", "star", "diamond", "square")
"""One more than there are colours, so that a pair of both repeats only after 42."""

GREY = "#808080"
"""The one text colour with contrast on white and on black."""

BLANK = "rgba(128,128,128,.3)"
"""The ground of maps with blank cells."""

RING = "#D55E00"
"""With a white edge it stands out from every colour of both scales."""

NOTED = {"symbol": "diamond-open", "color": "#009E73"}
"""The frame of cells that are to be told from ringed ones, by its shape and by its colour."""
