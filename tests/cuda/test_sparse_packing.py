"""2:4 weights in the format of the sparse tensor cores: round trips, metadata registers against the layout of the instruction, and errors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from whet.sparsity import two_four
from whet.tactics._two_four import compress, decompress, find_violation
from whet.tactics.cuda.sparse._compress import pair_rows, register_metadata

DTYPES = [np.float16, ml_dtypes.bfloat16, np.int8, ml_dtypes.float8_e4m3fn, np.float32]
_rng = np.random.default_rng(24)


def sparse_matrix(rows, columns, dtype, nonzeros=2):
    """A matrix with at most `kept` non-zeros in each group of four, at random positions; about a tenth of those are zero as well."""
    values = _rng.integers(-100, 101, (rows, columns // 4, 4))
    order = _rng.permuted(np.tile(np.arange(4), (rows, columns // 4, 1)), axis=-1)
    values[(order >= nonzeros) | (_rng.random(values.shape) < 0.1)] = 0
    return values.reshape(rows, columns).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("nonzeros", [0, 1, 2])
@pytest.mark.parametrize("shape", [(1, 4), (3, 8), (64, 128), (130, 512)])
def test_round_trip(dtype, nonzeros, shape):
    matrix = sparse_matrix(*shape, dtype, nonzeros)
    compressed = compress(matrix)
    assert compressed.values.dtype == matrix.dtype
    assert compressed.values.shape == (shape[0], shape[1] // 2)
    first, second = compressed.metadata & 3, compressed.metadata >> 2
    assert (first < second).all(), "the instruction needs positions in ascending order"
    assert (second < 4).all()
    assert np.array_equal(decompress(compressed).astype(np.float32), matrix.astype(np.float32))


def test_every_pattern_of_a_group():
    patterns = [p for p in np.ndindex(2, 2, 2, 2) if sum(p) <= 2]
    matrix = np.array(patterns, np.float16) * np.array([1, 2, 3, 4], np.float16)
    assert np.array_equal(decompress(compress(matrix)), matrix)


def test_pruned_weights_are_taken():
    matrix = two_four(_rng.standard_normal((40, 96)).astype(np.float32), 1)
    assert np.array_equal(decompress(compress(matrix)), matrix)


def test_negative_zero_counts_as_zero():
    matrix = np.array([[-0.0, 1, -0.0, 2, 3, -0.0, -0.0, -0.0]], np.float32)
    assert find_violation(matrix) is None
    assert np.array_equal(decompress(compress(matrix)), matrix)


def test_the_first_violation_is_named():
    matrix = sparse_matrix(9, 32, np.float32)
    matrix[3, 8:12] = [1, 0, 2, 3]
    matrix[7, :4] = 1
    found = find_violation(matrix)
    assert (found.row, found.column, found.nonzeros, found.nan) == (3, 8, 3, False)
    with pytest.raises(ValueError, match="row 3, columns 8-11 have 3 non-zeros; 2:4 weights have at most two"):
        compress(matrix)
    matrix[1, 21] = np.nan
    with pytest.raises(ValueError, match="row 1, columns 20-23 hold a NaN"):
        compress(matrix)


def test_a_violation_in_a_later_block_of_rows_is_named():
    matrix = sparse_matrix(20, 32, np.int8)
    matrix[17, 28:] = 5
    assert find_violation(matrix, block_elements=64).row == 17


def test_rows_without_whole_groups_are_refused():
    with pytest.raises(ValueError, match="rows of 6 elements have no whole groups of four"):
        compress(np.zeros((2, 6), np.float32))


def instruction_metadata(words, instruction, size):
    """[64, groups]: metadata of one instruction, read from the registers of 128 threads in the layout given by CUTLASS.

    CUTLASS, mma_traits_sm90_gmma_sparse.hpp: ELayout_64x32 and ELayout_64x64 map (thread, bit pair) to element m + 64 * k.
    """
    columns = 32 if size == 2 else 64
    out = np.zeros((64, columns // 4), np.int64)
    for thread in range(128):
        low, high, g, warp = thread % 2, thread // 2 % 2, thread // 4 % 8, thread // 32
        if size == 2:
            if high != instruction:  # the sparsity selector names the threads
                continue
            start, value_strides = 1024 * low + g + 16 * warp, [(16, 64), (2, 8)]
            word = int(words[thread, 0])
        else:
            start, value_strides = 8 * low + 2048 * high + g + 16 * warp, [(32, 64)]
            word = int(words[thread, instruction])
        for v in range(32):  # a bit of the register per element
            outer, inner = divmod(v, value_strides[0][0])
            at = start + inner * value_strides[0][1] + (outer * value_strides[1][1] if len(value_strides) > 1 else 0)
            row, column = at % 64, at // 64
            if column % 4 == 0:  # four elements share four bits of the register
                out[row, column // 4] = word >> v & 15
    return out


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("rows", [64, 128, 200])
def test_registers_hold_the_metadata_of_each_instruction(size, rows):
    step = 128 // size
    metadata = compress(sparse_matrix(rows, 3 * step, np.float32)).metadata
    words = register_metadata(metadata, size)
    assert words.shape == (3, -(-rows // 64), 128, 1 if size == 2 else 2)
    assert words.dtype == np.uint32
    for k in range(3):
        for tile in range(words.shape[1]):
            got = np.hstack([instruction_metadata(words[k, tile], i, size) for i in range(2)])
            want = np.full((64, step // 4), 4)
            here = metadata[tile * 64 : tile * 64 + 64, k * step // 4 : (k + 1) * step // 4]
            want[: len(here)] = here
            assert np.array_equal(got, want)


def test_metadata_of_part_of_a_step_is_refused():
    with pytest.raises(ValueError, match="8 groups of four are no whole K steps of 16"):
        register_metadata(np.zeros((64, 8), np.uint8), 2)


def test_paired_rows_are_adjacent_in_a_thread():
    rows = pair_rows(np.arange(48)[:, None])[:, 0]
    for warp in range(3):
        for g in range(8):
            assert (rows[warp * 16 + g], rows[warp * 16 + g + 8]) == (warp * 16 + 2 * g, warp * 16 + 2 * g + 1)
