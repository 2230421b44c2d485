"""A model is taken apart only where its parts sum to what it computes."""

import pytest
import torch

from align_circuits.circuits.decomposition import check_same


@pytest.mark.parametrize(("dtype", "share"), [(torch.float64, 1e-6), (torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_numbers_may_lie_apart_by_rounding_and_no_more(dtype, share):
    captured = torch.tensor([4.0, -2.0, 1.0], dtype=torch.float64)
    for largest, size in ((4, None), (40, torch.full((3,), -40.0))):
        near, far = (captured + torch.tensor([0, 0, times * share * largest]) for times in (0.9, 1.5))
        check_same("this", near, captured.to(dtype), size)
        with pytest.raises(ValueError, match="this is not what the model's weights make of its parts"):
            check_same("this", far, captured.to(dtype), size)


@pytest.mark.parametrize("times", [2, 3, -1, float("nan")])
def test_multiples_are_not_the_same(times):
    captured = torch.tensor([[4.0, -2.0]])
    with pytest.raises(ValueError, match="this is not what the model's weights make of its parts"):
        check_same("this", times * captured, captured)
