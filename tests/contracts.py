"""A contract for import-linter: no function shares the name of a file, so neither shadows the other."""

import ast
from pathlib import Path

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output

import align_circuits

PACKAGE = Path(__file__).parents[1] / "align_circuits"


class NamesOfFiles(Contract):
    """No public function or class has the name of a module that stands beside it, or of any module if `__all__` has it.

    A room that lists the function would else hide the file, or the file the function, by the order of imports.
    """

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Compares the names of modules with the public names that they define."""
        del verbose
        modules = {name for name in graph.modules if "." in name}
        everywhere = {name.rpartition(".")[2] for name in modules}
        exported = set(align_circuits.__all__)
        clashes = []
        linked = [path for room in ("hooks", "validation") for path in (PACKAGE / room).rglob("*.py")]
        for path in sorted([*PACKAGE.rglob("*.py"), *linked]):  # rglob follows no symlink
            room = ".".join((PACKAGE.name, *path.relative_to(PACKAGE).parts[:-1]))
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and (
                    f"{room}.{node.name}" in modules or (node.name in exported and node.name in everywhere)
                ):
                    clashes.append(f"{path.relative_to(PACKAGE)}: {node.name} is the name of a file, too")
        return ContractCheck(kept=not clashes, metadata={"clashes": clashes})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Lists the names that are taken twice."""
        for clash in check.metadata["clashes"]:
            output.print_error(clash)
