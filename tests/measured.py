"""Tables written by hand."""

from typing import Any

import numpy as np
import pandas as pd

from align_circuits.tables.provenance import Provenance
from align_circuits.tables.tables import Table


def table_of(rows: Any, **columns: Any) -> Table:
    """Rows as a table; without intervals and of one case each, unless `columns` or the rows say otherwise."""
    frame = pd.DataFrame(rows)
    given = {"low": np.nan, "high": np.nan, "n": 1} | columns
    return Table(frame.assign(**{name: of for name, of in given.items() if name not in frame}), Provenance("test"))
