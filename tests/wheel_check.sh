#!/bin/sh
# Builds the sdist and the wheel, installs the wheel away from the checkout, and uses it there.
# usage: wheel_check.sh PYTHON
set -eu
python=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m build --quiet --no-isolation --outdir "$work/dist" .
"$python" -m pip install --quiet --no-deps --target "$work/site" "$work"/dist/*.whl
cd "$work"
PYTHONPATH="$work/site" "$python" - "$work/site" <<'EOF'
import pathlib, sys

# The checkout is installed beside, and its finder would supply every module that the wheel lacks.
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]

import align_circuits as ac
import align_circuits.hooks
from align_circuits.models.tokenizer import char_tokenizer

site = pathlib.Path(sys.argv[1]).resolve()
for module in (ac, ac.hooks):
    place = pathlib.Path(module.__file__).resolve()
    assert site in place.parents, f"{module.__name__} comes from {place}, not from the installed wheel"
assert len(char_tokenizer()) == 64, "the wheel lacks the bundled tokenizer"
for name, layers in (("toy-llama", 7), ("toy-llama-ica", 7), ("sparse-gpt2", 3)):
    assert ac.load(name).cfg.n_layers == layers, f"the wheel lacks {name}"
from align_circuits.cli import main

assert main(["tune", "--help"]) == 0, "the wheel lacks the help of verbs"
assert main(["reproduce", "localize/null"]) == 2, "what validates the package is run from a checkout"
from align_circuits.papers.experiments import EXPERIMENTS

assert "localizers/zoo" in EXPERIMENTS, "the wheel lacks what methods are compared on"
assert not (site / "align_circuits" / "validation").exists(), "the wheel holds what validates the package"
assert "hooks" not in sys.modules, "hooks/ was imported under a second name"
print("the wheel imports and carries its data")
EOF
