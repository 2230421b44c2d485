"""Muon beside PyTorch's, and what it makes of a matrix beside its formula on singular values."""

import pytest
import torch

from align_circuits.training.muon import Muon, orthogonalized

SHAPES = [(6, 20), (20, 6), (8, 8), (6, 20)]


def matrices():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(*shape, generator=generator)) for shape in SHAPES]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch 2.9 brought Muon")
def test_a_step_is_pytorchs_but_for_its_bfloat16():
    ours, theirs = matrices(), matrices()
    one, other = Muon(ours, lr=0.1, weight_decay=0.3), torch.optim.Muon(theirs, lr=0.1, weight_decay=0.3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for mine, its in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(*mine.shape, generator=generator)
            its.grad = mine.grad.clone()
        one.step()
        other.step()
    for mine, its, before in zip(ours, theirs, matrices(), strict=True):
        assert (mine - its).norm() < 0.02 * (its - before).norm()
        state, expected = one.state[mine]["momentum_buffer"], other.state[its]["momentum_buffer"]
        assert torch.equal(state, expected)


@pytest.mark.parametrize("rank", [6, 2])
@pytest.mark.parametrize("shape", [(3, 6, 20), (2, 20, 6)])
def test_the_iterations_act_on_singular_values_alone(shape, rank):
    generator = torch.Generator().manual_seed(2)
    n, n_rows, n_columns = shape
    given = torch.randn(n, n_rows, rank, generator=generator) @ torch.randn(n, rank, n_columns, generator=generator)
    left, values, right = torch.linalg.svd(given.double(), full_matrices=False)
    values = values / values.norm(dim=-1, keepdim=True)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    found = orthogonalized(given)
    torch.testing.assert_close(found.double(), left * values[:, None] @ right, rtol=1e-3, atol=1e-4)
    largest = torch.linalg.svdvals(found)[:, :rank]
    assert ((largest > 0.65) & (largest < 1.25)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_parameters_keep_their_type(dtype):
    given = [torch.nn.Parameter(matrix.detach().to(dtype)) for matrix in matrices()]
    expected = matrices()
    for one, other in zip(given, expected, strict=True):
        one.grad, other.grad = torch.ones_like(one), torch.ones_like(other)
    Muon(given, lr=0.1).step()
    Muon(expected, lr=0.1).step()
    for one, other in zip(given, expected, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.float(), other, rtol=0.02, atol=0.02)


def test_matrices_of_one_shape_and_two_types_go_together():
    given = [torch.nn.Parameter(torch.ones(4, 4, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    for matrix in given:
        matrix.grad = torch.eye(4, dtype=matrix.dtype)
    Muon(given, lr=0.1).step()
    torch.testing.assert_close(given[0].double(), given[1])


def test_a_matrix_of_zeros_stays_one():
    assert torch.equal(orthogonalized(torch.zeros(1, 3, 4)), torch.zeros(1, 3, 4))


def test_a_parameter_without_gradient_stays():
    given = matrices()
    given[0].grad = torch.ones(6, 20)
    Muon(given, lr=0.1, weight_decay=0.5).step()
    changed = [not torch.equal(now, before) for now, before in zip(given, matrices(), strict=True)]
    assert changed == [True, False, False, False]


def test_what_is_no_matrix_is_refused():
    with pytest.raises(ValueError, match=r"a parameter of shape \(3,\): Muon takes matrices; give others to AdamW"):
        Muon([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
