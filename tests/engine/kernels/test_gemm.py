"""The native matrix products compared with torch in float64, for each instruction set of this processor."""

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
    except native.NativeUnavailable as error:
        pytest.skip(str(error))
    if found.isa != isa:
        pytest.skip(f"there are no kernels of {isa} for {dtype}")
    return found


@pytest.fixture(params=[(name, isa) for name in _DTYPES for isa in native.ISAS], ids="-".join)
def any_kernels(request: pytest.FixtureRequest) -> native.Kernels:
    name, isa = request.param
    return kernels(_DTYPES[name], isa)


class Matrix:
    """Random packed weights [outputs, inputs], and a bias if one is asked for."""

    def __init__(
        self,
        kernels: native.Kernels,
        outputs: int,
        inputs: int,
        product: int,
        has_bias: bool,
        is_int8: bool = False,
    ) -> None:
        self.kernels, self.product = kernels, product
        weight = (torch.randn(outputs, inputs) / inputs**0.5).to(kernels.dtype)
        self.weight = rounded(weight) if is_int8 else weight.double()
        self.bias = torch.randn(outputs) if has_bias else None
        self.packed = torch.empty(-(-outputs // 32) * 32, inputs, dtype=torch.int8 if is_int8 else kernels.dtype)
        self.scales = torch.empty(outputs) if is_int8 else None
        arguments = weight.data_ptr(), outputs, inputs, product == SWIGLU, self.packed.data_ptr()
        if self.scales is None:
            kernels.pack(*arguments)
        else:
            kernels.pack_int8(*arguments, self.scales.data_ptr())
        scales, bias = (None if one is None else one.data_ptr() for one in (self.scales, self.bias))
        self.struct = native.NativeLinear(self.packed.data_ptr(), scales, bias, outputs, inputs)

    @property
    def width(self) -> int:
        return len(self.weight) // 2 if self.product == SWIGLU else len(self.weight)

    def __call__(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the native product of rows [n, inputs] into `out`, or add it to `out`."""
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
        """Compute the product in float64."""
        result = rows.double() @ self.weight.T
        if self.bias is not None:
            result += self.bias.double()
        if self.product != SWIGLU:
            return result
        gate, up = result.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Round to a 127th of each output's largest weight, in float64."""
    most = weight.float().abs().amax(dim=1, keepdim=True)
    factor = torch.full_like(most, 127) / most  # 127 / most would be 127 times the inverse, rounded twice
    return (weight.float() * factor).round().double() * (most / 127).double()


def rows_of(kernels: native.Kernels, n: int, inputs: int) -> torch.Tensor:
    return torch.randn(n, inputs).to(kernels.dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    # Sums of some hundred products of about 1/sqrt(inputs); a bfloat16 result has 8 bits.
    tolerance = 1e-2 if actual.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("product", [TO_FLOATS, ADD_FLOATS, SWIGLU])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [(1, 32, 32), (5, 96, 64), (17, 160, 288), (33, 64, 544), (300, 64, 96), (300, 1088, 288)],
)
def test_products_are_those_of_torch(
    any_kernels: native.Kernels, rows: int, outputs: int, inputs: int, product: int, has_bias: bool, is_int8: bool
) -> None:
    torch.manual_seed(rows)
    matrix = Matrix(any_kernels, outputs, inputs, product, has_bias, is_int8)
    x = rows_of(any_kernels, rows, inputs)
    if product == ADD_FLOATS:
        before = torch.randn(rows, outputs)
        assert_close(matrix(x, before.clone()), matrix.expected(x) + before.double())
    else:
        assert_close(matrix(x), matrix.expected(x))


@pytest.mark.parametrize("outputs", [1, 31, 33, 250])
def test_any_number_of_outputs(any_kernels: native.Kernels, outputs: int) -> None:
    """Vocabularies are seldom a multiple of 32; memory beside the products stays unchanged."""
    torch.manual_seed(outputs)
    matrix = Matrix(any_kernels, outputs, 64, TO_FLOATS, True)
    x = rows_of(any_kernels, 7, 64)
    assert_close(matrix(x), matrix.expected(x))


@pytest.mark.parametrize("is_int8", [False, True])
def test_a_row_does_not_depend_on_its_batch(any_kernels: native.Kernels, is_int8: bool) -> None:
    """A row's result is equal bit for bit among any number of rows, at any place."""
    torch.manual_seed(0)
    matrix = Matrix(any_kernels, 96, 352, TO_FLOATS, True, is_int8)
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


def test_results_too_large_for_caches(any_kernels: native.Kernels) -> None:
    """Results are streamed past the caches, in several blocks of rows; all arrive, and nothing else is written."""
    torch.manual_seed(1)
    matrix = Matrix(any_kernels, 480, 32, TO_FLOATS, True)
    x = rows_of(any_kernels, 1200, 32)
    assert_close(matrix(x), matrix.expected(x))


def test_an_output_without_weights_is_its_bias(any_kernels: native.Kernels) -> None:
    """The output's scale would otherwise be zero divided by zero."""
    matrix = Matrix(any_kernels, 32, 32, TO_FLOATS, True)
    zeros, packed, scales = (
        torch.zeros(32, 32, dtype=any_kernels.dtype),
        torch.ones(32, 32, dtype=torch.int8),
        torch.ones(32),
    )
    any_kernels.pack_int8(zeros.data_ptr(), 32, 32, False, packed.data_ptr(), scales.data_ptr())
    matrix.struct.packed, matrix.struct.scales = packed.data_ptr(), scales.data_ptr()
    assert matrix.bias is not None
    assert torch.equal(matrix(rows_of(any_kernels, 3, 32)), matrix.bias.expand(3, 32))
