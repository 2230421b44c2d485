"""What `on_a_gpu.py` asks of a GPU, asked of a pretended one where PyTorch is built without CUDA.

In a process of its own: PyTorch must find the device before its first backward pass, and never forgets it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pretend_gpu import build, compiler

HERE = Path(__file__).parent
START = """
import ctypes, sys
if sys.argv[1]:
    ctypes.CDLL(sys.argv[1])
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""


QUICK = "mixed or crosses or test_load or (scores and fast) or (edits and auto and patch)"
"""A few seconds: what raises, loading, scores on one device and on two, an edit."""
REST = pytest.param(f"not ({QUICK})", marks=pytest.mark.slow)


@pytest.mark.skipif(torch.version.cuda is not None and not torch.cuda.is_available(), reason="built for CUDA, no GPU")
@pytest.mark.skipif(torch.version.cuda is None and compiler() is None, reason="no C++ compiler to pretend a GPU with")
@pytest.mark.parametrize("which", [QUICK, REST], ids=["quick", "rest"])
def test_on_a_gpu(tmp_path, which):
    library = str(build(tmp_path)) if torch.version.cuda is None else ""
    here = str(HERE / "on_a_gpu.py")
    pretend = [sys.executable, "-c", START, library, here, "-k", which, "-q", "-p", "no:cacheprovider"]
    untyped = {"PYTHONPATH": str(HERE.parent), "JAXTYPING_DISABLE": "1"}  # shapes are checked elsewhere
    run = subprocess.run(
        pretend, cwd=HERE.parent, env=os.environ | untyped, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
