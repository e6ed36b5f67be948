"""Matrix products of the native kernels against torch in float64, for each instruction set this processor has."""

import ctypes

import pytest
import torch

from engine.kernels import native

TO_FLOATS, ADD_FLOATS, SWIGLU = range(3)
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
_THREADS = 2


def kernels(dtype: torch.dtype, isa: str) -> native.Kernels:
    try:
        found = native.kernels(dtype, isa)
    except native.Unavailable as error:
        pytest.skip(str(error))
    if found.isa != isa:
        pytest.skip(f"there are no kernels of {isa} for {dtype}")
    return found


@pytest.fixture(params=[(name, isa) for name in _DTYPES for isa in native.ISAS], ids="-".join)
def any_kernels(request) -> native.Kernels:
    name, isa = request.param
    return kernels(_DTYPES[name], isa)


class Matrix:
    """Random weights [outputs, inputs], packed, and a bias where one is wanted."""

    def __init__(self, kernels: native.Kernels, outputs: int, inputs: int, product: int, has_bias: bool) -> None:
        self.kernels, self.product = kernels, product
        self.weight = (torch.randn(outputs, inputs) / inputs**0.5).to(kernels.dtype)
        self.bias = torch.randn(outputs) if has_bias else None
        self.packed = torch.empty(-(-outputs // 32) * 32, inputs, dtype=kernels.dtype)
        kernels.pack(self.weight.data_ptr(), outputs, inputs, product == SWIGLU, self.packed.data_ptr())
        bias = None if self.bias is None else self.bias.data_ptr()
        self.struct = native.Linear(self.packed.data_ptr(), None, bias, outputs, inputs)

    @property
    def width(self) -> int:
        return len(self.weight) // 2 if self.product == SWIGLU else len(self.weight)

    def __call__(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The native product: of rows [n, inputs], to or added to `out`."""
        padded = torch.full((-(-len(rows) // 16) * 16, rows.shape[1]), torch.nan, dtype=rows.dtype)
        padded[: len(rows)] = rows
        if out is None:
            dtype = self.kernels.dtype if self.product == SWIGLU else torch.float32
            out = torch.full((len(rows), self.width), torch.nan, dtype=dtype)
        self.kernels.linear(
            ctypes.byref(self.struct),
            padded.data_ptr(),
            rows.shape[1],
            len(rows),
            self.product,
            out.data_ptr(),
            self.width,
            _THREADS,
        )
        return out

    def expected(self, rows: torch.Tensor) -> torch.Tensor:
        """In float64."""
        result = rows.double() @ self.weight.double().T
        if self.bias is not None:
            result += self.bias.double()
        if self.product != SWIGLU:
            return result
        gate, up = result.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up


def rows_of(kernels: native.Kernels, n: int, inputs: int) -> torch.Tensor:
    return torch.randn(n, inputs).to(kernels.dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    # Sums of some hundred products of about 1/sqrt(inputs); a bfloat16 result has 8 bits.
    tolerance = 1e-2 if actual.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("product", [TO_FLOATS, ADD_FLOATS, SWIGLU])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 32, 32), (5, 96, 64), (17, 160, 288), (33, 64, 544), (300, 64, 96)]
)
def test_products_are_those_of_torch(any_kernels, rows, outputs, inputs, product, has_bias):
    torch.manual_seed(rows)
    matrix = Matrix(any_kernels, outputs, inputs, product, has_bias)
    x = rows_of(any_kernels, rows, inputs)
    if product == ADD_FLOATS:
        before = torch.randn(rows, outputs)
        assert_close(matrix(x, before.clone()), matrix.expected(x) + before.double())
    else:
        assert_close(matrix(x), matrix.expected(x))


@pytest.mark.parametrize("outputs", [1, 31, 33, 250])
def test_any_number_of_outputs(any_kernels, outputs):
    """A vocabulary is seldom a multiple of 32; what lies beside the products is left alone."""
    torch.manual_seed(outputs)
    matrix = Matrix(any_kernels, outputs, 64, TO_FLOATS, True)
    x = rows_of(any_kernels, 7, 64)
    assert_close(matrix(x), matrix.expected(x))


def test_a_row_does_not_depend_on_its_batch(any_kernels):
    """Bit for bit, in any number of rows and at any place among them."""
    torch.manual_seed(0)
    matrix = Matrix(any_kernels, 96, 352, TO_FLOATS, True)
    x = rows_of(any_kernels, 300, 352)
    together = matrix(x)
    for first, count in [
        (0, 1),
        (1, 1),
        (3, 2),
        (5, 7),
        (20, 12),
        (40, 13),
        (60, 16),
        (80, 17),
        (100, 45),
        (30, 270),
    ]:
        assert torch.equal(matrix(x[first : first + count]), together[first : first + count]), (first, count)
