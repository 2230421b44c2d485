"""The suite notices wrong shapes and types: in functions, methods, dataclasses, closures, with shapes or without."""

import importlib
import sys

import jaxtyping
import pytest
import torch
from jaxtyping import TypeCheckError, install_import_hook

from align_circuits.heads.metrics import entropy

MODULE = """
from dataclasses import dataclass
from jaxtyping import Float
from torch import Tensor

def plain(number: int) -> str:
    return "" if number else 0

def same(one: Float[Tensor, "a b"], other: Float[Tensor, "a b"]) -> Float[Tensor, " b"]:
    return one[0] if len(one) < 3 else one

@dataclass
class Shaped:
    values: dict[str, Float[Tensor, " a"]]

@dataclass
class Plain:
    number: int

    def method(self, number: int) -> int:
        return number

def outer(annotation):
    def closure(x: Float[Tensor, "a a"], scale: annotation) -> Float[Tensor, " a"]:
        return x if scale == 3 else x[0]
    return closure
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    (folder / "with_shapes.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        with install_import_hook("with_shapes", "shape_checks.check"):
            yield importlib.import_module("with_shapes")
    del sys.modules["with_shapes"]


SQUARE, WIDE, TALL = torch.zeros(2, 2), torch.zeros(2, 3), torch.zeros(3, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda module: module.plain("one"),
        lambda module: module.plain(0),
        lambda module: module.same(SQUARE, WIDE),
        lambda module: module.same(TALL, TALL),
        lambda module: module.Shaped({"a": SQUARE}),
        lambda module: module.Plain("one"),
        lambda module: module.Plain(1).method("one"),
        lambda module: module.outer(int)(WIDE, 1),
        lambda module: module.outer(int)(SQUARE, 1.0),
        lambda module: module.outer(int)(SQUARE, 3),
        lambda module: module.outer(float)(SQUARE, "one"),
        lambda _: entropy(SQUARE[None], WIDE[None].bool()),
    ],
)
def test_what_is_wrong_raises_unless_checks_are_off(module, wrong, monkeypatch):
    for _ in range(2):  # a closure is made anew each time
        with pytest.raises(TypeCheckError):
            wrong(module)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    try:
        wrong(module)
    except TypeCheckError:
        pytest.fail("it was checked")
    except RuntimeError as error:
        assert "size of tensor" in str(error)


def test_what_is_right_passes(module):
    assert module.plain(1) == "" and module.Plain(1).method(2) == 2 and module.Shaped({"a": SQUARE[0]}).values
    assert module.same(SQUARE, SQUARE).shape == module.outer(int)(SQUARE, 1).shape == (2,)
    assert module.outer(float)(SQUARE, 1.0).shape == (2,), "a closure of one name with other annotations"
