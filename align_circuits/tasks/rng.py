"""Named random generators: the draws of one part of a task never affect those of another part."""

import hashlib

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor


def check_seed(seed: int) -> None:
    """Raises a ValueError unless PyTorch takes a seed."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"the seed is {seed}: give an integer from 0 to 2**63 - 1")


class Rng:
    """A random generator for each name, all from one seed.

    Every generator fills arrays row by row with the prompt as the first dimension, so that the first prompts of a seed
    are the same however many are drawn, and in chunks of any size.

    >>> short, long = Rng(0).uniform("x", 2, 3), Rng(0).uniform("x", 5, 3)
    >>> bool((short == long[:2]).all())
    True
    """

    def __init__(self, seed: int, purpose: str = ""):
        check_seed(seed)
        self._seed, self._purpose = seed, purpose
        self._generators: dict[str, np.random.Generator] = {}

    def generator(self, name: str) -> np.random.Generator:
        """Returns the generator of a name; every call returns the same object."""
        if name not in self._generators:
            self._generators[name] = np.random.default_rng(_number(self._seed, self._purpose, name))
        return self._generators[name]

    def uniform(self, name: str, *shape: int) -> Float[Tensor, "..."]:
        """Returns numbers in [0, 1)."""
        return torch.from_numpy(self.generator(name).random(shape, dtype=np.float32))

    def below(self, name: str, limit: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Returns uniform integers from 0 up to but excluding `limit`, of its shape and dtype."""
        return (self.uniform(name, *limit.shape) * limit).to(limit.dtype)

    def order(self, name: str, *shape: int, late: Int[Tensor, "..."] | None = None) -> Int[Tensor, "..."]:
        """Returns random orders of `range(shape[-1])` along the last dimension.

        Args:
            name: The name of the generator.
            *shape: The shape of the result.
            late: 0 or 1 for each index: those with a 1 come after all those with a 0.
        """
        # Sorting random keys gives a uniform order. The index is in the low bits of its key, so that the sorted keys
        # contain the order; the random part has 24 bits or more.
        bits = max(shape[-1] - 1, 1).bit_length()
        width, dtype = (30, np.int32) if bits <= 6 else (62, np.int64)  # 32-bit values sort faster
        keys = self.generator(name).integers(2 ** (width - bits), size=shape, dtype=dtype) << bits
        keys |= np.arange(shape[-1], dtype=dtype)
        if late is not None:
            keys |= late.numpy().astype(dtype) << width
        keys.sort(axis=-1)
        return torch.from_numpy(keys & (2**bits - 1)).long()

    def distinct(self, name: str, size: int, limit: Int[Tensor, "..."]) -> Int[Tensor, "... size"]:
        """Returns `size` different integers below `limit`, in random order: any first few are a uniform draw too."""
        uniform = self.uniform(name, *limit.shape, size)
        drawn, taken = [], []  # `taken` is `drawn`, kept sorted
        for count in range(size):
            value = (uniform[..., count] * (limit - count)).to(limit.dtype)
            for earlier in taken:
                value = value + (value >= earlier)  # skip what is taken
            drawn.append(value)
            for index, earlier in enumerate(taken):
                taken[index], value = torch.minimum(earlier, value), torch.maximum(earlier, value)
            taken.append(value)
        return torch.stack(drawn, dim=-1)


def _number(seed: int, *names: str) -> int:
    """A number of 128 bits that no other seed and names share."""
    # Not `hash`, which differs between processes.
    return int.from_bytes(hashlib.sha256("/".join((str(seed), *names)).encode()).digest()[:16], "big")
