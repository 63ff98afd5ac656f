"K-quants: the gguf package reads every block as we do; extreme blocks; importance helps."

import gguf
import numpy as np
import pytest

from trainkit.quant import ggml
from trainkit.quant.ggml import BLOCKS, PACKED, pack_blocks, unpack_blocks

KINDS = {name: (size, width) for name, size, width, _ in BLOCKS.values()}


def theirs(blocks, kind):
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", PACKED)
def test_any_bytes_are_unpacked_as_by_the_package(kind):
    "Every bit of every byte; the scales are random bits too, as long as they are finite."
    size, width = KINDS[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (400, width), np.uint8)
    wanted = theirs(blocks, kind)
    finite = np.isfinite(wanted).all(1)
    assert finite.mean() > 0.8
    with np.errstate(all="ignore"):
        found = unpack_blocks(blocks, kind).reshape(-1, size)
    assert np.array_equal(found[finite], wanted[finite])


def extreme(kind):
    size = KINDS[kind][0]
    draw = np.random.default_rng(1)
    normal = draw.normal(size=(3, 2 * size))
    spike = np.where(np.arange(2 * size) == 7, 100, 0.01 * normal[:1])
    return {
        "normal": normal,
        "zeros": np.zeros((3, 2 * size)),
        "constant": np.full((3, 2 * size), -0.7),
        "positive": np.abs(normal) + 1,
        "one spike": spike,
        "half of zeros": np.where(np.arange(2 * size) < size, 0, normal),
        "large": 1e4 * normal,
        "tiny": 1e-30 * normal,
    }


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("kind", PACKED)
def test_extreme_blocks_are_packed(kind, weighed):
    "Each number is off by at most a step of its group, and the package reads the same."
    for name, x in extreme(kind).items():
        given = np.linspace(0, 1, x.shape[1]) if weighed else None
        packed = pack_blocks(x, kind, given)
        assert packed.shape == (len(x), x.shape[1] // KINDS[kind][0] * KINDS[kind][1]), name
        found = unpack_blocks(packed, kind).reshape(x.shape)
        assert np.array_equal(found, theirs(packed, kind).reshape(x.shape)), name
        wide = np.abs(x).max(initial=1e-30)
        assert np.abs(found - x).max() <= 0.3 * wide + 2e-7, name


@pytest.mark.parametrize("kind", PACKED)
def test_importance_moves_the_error(kind):
    draw = np.random.default_rng(2)
    x = draw.standard_t(5, size=(64, 256)).astype(np.float32)
    importance = draw.lognormal(0, 2, size=256).astype(np.float32)
    errors = [
        float((importance * np.square(unpack_blocks(y, kind).reshape(x.shape) - x)).mean())
        for y in (pack_blocks(x, kind), pack_blocks(x, kind, importance))
    ]
    assert errors[1] < 0.95 * errors[0]
    # Chunks of rows do not change the bytes
    whole = pack_blocks(np.tile(x, (9, 1)), kind, importance)
    assert np.array_equal(whole[-64:], pack_blocks(x, kind, importance))


@pytest.mark.parametrize(
    "x, importance, message",
    [
        (np.full((1, 256), np.inf), None, "NaN or Inf"),
        (np.full((1, 256), 1e30), None, "16-bit"),
        (np.ones((1, 255)), None, "multiple of 256"),
        (np.ones(256), None, "multiple of 256"),
        (np.ones((1, 256)), np.ones(255), "importance has shape"),
        (np.ones((1, 256)), np.full(256, np.nan), "finite"),
        (np.ones((1, 256)), np.full(256, -1.0), "finite"),
    ],
)
def test_what_has_no_block_is_refused(x, importance, message):
    with pytest.raises(ValueError, match=message):
        pack_blocks(x, "Q4_K", importance)


def test_where_no_line_fits_the_range_decides():
    "With one number that counts a line is not determined: the codes are the first ones."
    x = np.array([[-1.0], [-0.5], [0.25], [0.5]], np.float32)
    weights = np.array([[1.0], [0.0], [0.0], [0.0]], np.float32)
    with np.errstate(invalid="ignore"):
        scale, minimum, codes = ggml._fit_range(x, weights, 15, np.linspace(-1, 1, 21))
    assert (float(scale[0]), float(minimum[0])) == (pytest.approx(0.1), 1.0)
    assert codes[:, 0].tolist() == [0, 5, 12, 15]


def test_scales_of_a_superblock_are_searched():
    "Eight scales share one number; without a search the largest error is 0.000185."
    from trainkit.quant.ggml import _fit_scales

    r = np.random.default_rng(0)
    x = r.random((8, 4000), dtype=np.float32) + np.float32(0.05)
    weights = r.random((8, 4000), dtype=np.float32)
    scale, codes = _fit_scales(x, weights)
    error = (weights * (x - scale * codes) ** 2).sum(0)
    assert error.max() < 1.75e-4 and error.mean() < 4.88e-5 and codes.max() <= 63


def uneven_matrix():
    "Rows of all sizes, with outliers, a mean, one sign, zeros, a constant group, tiny numbers."
    draw = np.random.default_rng(0)
    x = draw.standard_normal((24, 512)) * draw.uniform(0.02, 0.2, (24, 1))
    x[:, ::37] *= 3
    x[7] += 0.3
    x[9] = np.abs(x[9])
    x[11, :256] = 0
    x[12, 32:64] = 0.05
    x[13] *= 1e-6
    return x.astype(np.float32), draw.uniform(0.3, 2, 512).astype(np.float32) ** 2


MATRIX, IMPORTANCE = uneven_matrix()


@pytest.mark.parametrize(
    "kind, error, total, weighed_error, weighed_total",
    [
        ("Q4_0", 2.426177, 836891, 3.528856, 836137),
        ("Q4_1", 1.273252, 927882, 1.816596, 924872),
        ("Q5_0", 0.6030093, 993273, 0.8937602, 992458),
        ("Q5_1", 0.2966153, 1118737, 0.4236784, 1119608),
        ("Q4_K", 1.345764, 864032, 1.883575, 868781),
        ("Q5_K", 0.3392152, 1063358, 0.4929703, 1061553),
        ("Q6_K", 0.09670117, 1182237, 0.1358497, 1181414),
    ],
)
def test_a_matrix_has_the_errors_and_bytes_that_it_had(
    kind, error, total, weighed_error, weighed_total
):
    """The whole search for scales in two numbers each; another order of sums moves a few codes.

    `error` is the sum of squared errors, `total` that of the bytes."""
    for importance, wanted, bytes_wanted in (
        (None, error, total),
        (IMPORTANCE, weighed_error, weighed_total),
    ):
        packed = pack_blocks(MATRIX, kind, importance)
        found = unpack_blocks(packed, kind).reshape(MATRIX.shape).astype(float)
        squares = np.square(found - MATRIX) * (1 if importance is None else importance)
        assert squares.sum() == pytest.approx(wanted, rel=1e-4)
        assert packed.astype(np.int64).sum() == pytest.approx(bytes_wanted, rel=3e-5)
