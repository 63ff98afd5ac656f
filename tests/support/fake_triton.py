"""A pretended Triton: a kernel runs in torch on the CPU, one instance of its grid after another.

It has as much of `triton.language` as the kernels of trainkit use, and is stricter than a GPU: an
address outside its tensor is an `IndexError`, and every number is stored exactly once. Triton
itself is a gigabyte, so most machines without a GPU lack it. Speed is not tried.
"""

import itertools
from types import ModuleType

import torch
from torch import Tensor

instance = (0, 0)  # Which of the grid runs


class Address:
    "A pointer to the numbers of a tensor, moved by whole numbers."

    def __init__(self, numbers: Tensor, at: Tensor | int = 0, stored: Tensor | None = None):
        self.numbers = numbers
        self.at = at
        self.stored = torch.zeros(numbers.numel(), dtype=torch.int) if stored is None else stored

    def __add__(self, steps: Tensor) -> "Address":
        return Address(self.numbers, self.at + steps, self.stored)

    @property
    def dtype(self) -> ModuleType:
        kind = ModuleType("pointer")
        kind.__dict__["element_ty"] = self.numbers.dtype
        return kind

    def places(self, mask: Tensor) -> Tensor:
        places = torch.as_tensor(self.at).expand(mask.shape)[mask]
        if len(places) and not 0 <= int(places.min()) <= int(places.max()) < self.numbers.numel():
            raise IndexError(f"an address outside of {self.numbers.numel()} numbers")
        return places


def arange(start: int, stop: int) -> Tensor:
    assert (stop - start).bit_count() == 1, "Triton's tiles have a power of two of places"
    return torch.arange(start, stop)


def load(address: Address, mask: Tensor | None = None, other: float = 0) -> Tensor:
    mask = torch.ones_like(torch.as_tensor(address.at), dtype=torch.bool) if mask is None else mask
    out = torch.full(mask.shape, other, dtype=address.numbers.dtype)
    out[mask] = address.numbers.view(-1)[address.places(mask)]
    return out


def store(address: Address, value: Tensor, mask: Tensor) -> None:
    places = address.places(mask)
    address.numbers.view(-1)[places] = value[mask]
    address.stored[places] += 1


class Kernel:
    "What `triton.jit` makes of a function: `kernel[grid](tensors and numbers)` runs it."

    def __init__(self, function):
        self.function = function

    def __getitem__(self, grid):
        def run(*arguments, **options):
            global instance
            given = [Address(x) if isinstance(x, Tensor) else x for x in arguments]
            for place in itertools.product(*map(range, grid)):
                instance = place
                self.function(*given, **options)
            written = [x.stored for x in given if isinstance(x, Address) and x.stored.any()]
            assert len(written) == 1 and (written[0] == 1).all()

        return run


def pretended_triton() -> dict[str, ModuleType]:  # For sys.modules
    "The modules `triton` and `triton.language`."
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    triton.__dict__.update(
        jit=Kernel,
        cdiv=lambda a, b: -(-a // b),
        language=language,
    )
    language.__dict__.update(
        constexpr=int,
        float32=torch.float32,
        int32=torch.int32,
        program_id=lambda axis: instance[axis],
        zeros=lambda shape, dtype: torch.zeros(shape, dtype=dtype),
        dot=lambda a, b, input_precision: a.float() @ b.float(),
        arange=arange,
        load=load,
        store=store,
        where=torch.where,
    )
    return {"triton": triton, "triton.language": language}
