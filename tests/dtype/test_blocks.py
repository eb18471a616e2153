"""Quantized blocks against the gguf package: all bits of decoded elements, and of those encoders that it has."""

from __future__ import annotations

import gguf
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp

from max.dtype.blocks import BLOCK_FORMATS, ENCODED_FORMATS, decode, encode
from tests.quantized import ENCODINGS, HALVES


def reference(blocks: np.ndarray, encoding: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[encoding])


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """NaN may have any payload."""
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    keep = ~np.isnan(expected)
    np.testing.assert_array_equal(actual[keep].view(np.uint32), expected[keep].view(np.uint32))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_any_bytes(encoding, rng):
    size = BLOCK_FORMATS[encoding].bytes
    blocks = rng.integers(0, 256, (300, 3 * size), dtype=np.uint8)
    assert_same_bits(decode(blocks, encoding), reference(blocks, encoding))
    every = np.repeat(np.arange(256, dtype=np.uint8)[:, None], size, 1)
    assert_same_bits(decode(every, encoding), reference(every, encoding))


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("scale", [0x0000, 0x8000, 0x0001, 0x7BFF, 0x7C00, 0xFC00, 0x7E00])
def test_strange_scales(encoding, scale, rng):
    size = BLOCK_FORMATS[encoding].bytes
    blocks = rng.integers(0, 256, (20, size), dtype=np.uint8)
    places = {"Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2), **HALVES}
    for at in places.get(encoding, (0,)):
        blocks[:, at : at + 2] = np.array([scale], np.uint16).view(np.uint8)
        assert_same_bits(decode(blocks, encoding), reference(blocks, encoding))


FLOATS = st.floats(-1e4, 1e4, width=32)


@pytest.mark.parametrize("encoding", ["Q4_0", "Q8_0"])
@given(values=hnp.arrays(np.float32, (3, 64), elements=FLOATS))
def test_encoders_of_the_reference(encoding, values):
    with np.errstate(all="ignore"):
        expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType[encoding])
    np.testing.assert_array_equal(encode(values, encoding), expected)


WORST = {"Q4_0": 0.12, "Q8_0": 0.008, "Q4_K": 0.09, "Q5_K": 0.045, "Q6_K": 0.022}
"""Root mean square errors of normal numbers, as shares of theirs."""


@pytest.mark.parametrize("encoding", ENCODED_FORMATS)
def test_what_is_lost(encoding, rng):
    size = BLOCK_FORMATS[encoding].elements
    values = rng.standard_normal((200, 2 * size)) * 10.0 ** rng.uniform(-3, 3, (200, 1))
    decoded = reference(encode(values, encoding), encoding)
    error = np.sqrt(np.mean((decoded - values) ** 2, 1) / np.mean(values**2, 1))
    assert error.max() < WORST[encoding]
    # encoding decoded blocks again changes only the rounding of scales
    again = reference(encode(decoded, encoding), encoding)
    assert np.sqrt(np.mean((again - decoded) ** 2) / np.mean(decoded**2)) < WORST[encoding]
    assert not decode(encode(np.zeros((2, size)), encoding), encoding).any()
    for constant in (3.0, -2.5):
        same = decode(encode(np.full((1, size), constant), encoding), encoding)
        np.testing.assert_allclose(same, constant, rtol=0.02)


@given(
    hnp.arrays(np.float32, (2, 256), elements=st.floats(-4, 4, width=32)),
    hnp.arrays(np.float32, (256,), elements=st.floats(0, 64, width=32)),
    st.sampled_from(ENCODED_FORMATS),
)
def test_weights_make_no_block_worse(values, weights, encoding):
    blocks = [encode(values, encoding), encode(values, encoding, weights)]
    elements = BLOCK_FORMATS[encoding].elements
    plain, fitted = (
        (weights * np.square(reference(b, encoding) - values)).reshape(-1, elements).sum(1)
        for b in blocks
    )
    assert (fitted <= plain * (1 + 1e-5) + 1e-12).all()


@pytest.mark.parametrize("encoding", ENCODED_FORMATS)
def test_weights_are_minded(encoding, rng):
    """Errors of random rows are at least a fifth smaller under random weights; 8 bits have none."""
    values = rng.standard_normal((20, 512)).astype(np.float32)
    weights = np.exp(1.5 * rng.standard_normal(512)).astype(np.float32)
    plain, fitted = encode(values, encoding), encode(values, encoding, weights)
    if encoding == "Q8_0":
        np.testing.assert_array_equal(plain, fitted)
        return
    errors = [(weights * np.square(reference(b, encoding) - values)).sum() for b in (plain, fitted)]
    assert errors[1] < 0.8 * errors[0]
    # only relations between weights count
    np.testing.assert_array_equal(encode(values, encoding, 4 * weights), fitted)


def test_mistakes_of_weights():
    values = np.zeros((2, 64), np.float32)
    with pytest.raises(ValueError, match=r"weights \[32\] of values \[2, 64\], expected a shape"):
        encode(values, "Q4_0", np.ones(32, np.float32))
    for wrong in (-1, np.nan, np.inf):
        with pytest.raises(ValueError, match="a weight is negative or not finite"):
            encode(values, "Q4_0", np.full(64, wrong, np.float32))


def test_mistakes():
    with pytest.raises(ValueError, match="the format is 'IQ1_S', expected Q4_0, Q8_0, Q4_K"):
        decode(np.zeros(50, np.uint8), "IQ1_S")
    with pytest.raises(ValueError, match=r"uint8 \[2, 19\], expected .* multiple of 18 bytes"):
        decode(np.zeros((2, 19), np.uint8), "Q4_0")
    with pytest.raises(ValueError, match="int8"):
        decode(np.zeros((2, 18), np.int8), "Q4_0")
    with pytest.raises(ValueError, match=r"\[2, 100\], expected .* multiple of 256 elements"):
        encode(np.zeros((2, 100)), "Q6_K")
    with pytest.raises(ValueError, match="Q2_K is read from files only, expected Q4_0, Q8_0"):
        encode(np.zeros(256), "Q2_K")
    with pytest.raises(ValueError, match="Q8_0 holds finite values only"):
        encode(np.full(32, np.nan), "Q8_0")
    for encoding in ENCODED_FORMATS:
        with pytest.raises(ValueError, match="too large for the float16 scales"):
            encode(np.full(BLOCK_FORMATS[encoding].elements, 1e30), encoding)
    assert decode(np.zeros((0, 18), np.uint8), "Q4_0").shape == (0, 32)
    assert encode(np.zeros((3, 0)), "Q4_K").shape == (3, 0)
