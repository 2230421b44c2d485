"""The command line: `align-circuits VERB ...`, one file for each verb.

Arguments come in; a verb calls the public function of its name and writes a folder with `table.csv`, `report.html` and
`provenance.json`, from which `rerun` repeats it. Each verb is imported only when it is called.
"""

from align_circuits.cli.entry import main

__all__ = ["main"]
