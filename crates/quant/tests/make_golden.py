#!/usr/bin/env python3
"""Writes the golden vectors in tests/golden with the decoder of the Python package `gguf` (0.19.0, numpy 2.4.6).

    pip install gguf==0.19.0 numpy==2.4.6
    python3 tests/make_golden.py        # from crates/quant

A file holds the blocks of one type and behind them the weights they stand for, as little-endian f32. Bytes are
random; the block scales run through ordinary and extreme values.

`codebooks.bin` holds the rows of all codebooks, as i8. `activation.bin` holds activations, and behind them what they
are after rounding to Q8_0 and to Q8_K as llama.cpp does on x86, all as f32.
"""

from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, dequantize

# binary16: ordinary positive and negative, largest, smallest subnormal, negative zero, infinity, NaN.
SCALES = [0x1E66, 0x9D11, 0x7BFF, 0x0001, 0x8000, 0xFC00, 0x7E01]

# Where the f16 scales of a block lie; IQ1_M and MXFP4 are dealt with below.
SCALE_AT = {
    "Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
    "IQ1_S": [0], "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0], "IQ3_XXS": [0], "IQ3_S": [0],
    "IQ4_NL": [0], "IQ4_XS": [0],
}  # fmt: skip


def set_half(block: np.ndarray, at: int, bits: int) -> None:
    block[at], block[at + 1] = bits & 255, bits >> 8


def blocks(name: str, size: int, rng: np.random.Generator) -> np.ndarray:
    made = rng.integers(0, 256, (len(SCALES), size), dtype=np.uint8)
    for i, (block, bits) in enumerate(zip(made, SCALES)):
        if name == "IQ1_M":  # a nibble of the scale on top of each u16
            for part in range(4):
                byte = 49 + 2 * part
                block[byte] = (block[byte] & 15) | ((bits >> (4 * part) & 15) << 4)
        elif name == "MXFP4":
            block[0] = [0, 1, 2, 120, 127, 254, 255][i]
        else:
            # A second scale takes the next value in turn, so that unlike ones meet.
            for nth, at in enumerate(SCALE_AT[name]):
                set_half(block, at, SCALES[(i + nth) % len(SCALES)])
    return made


def numbers(name: str, size: int, rng: np.random.Generator) -> np.ndarray:
    made = rng.integers(0, 256, (40, size), dtype=np.uint8)
    for row, bits in zip(made, SCALES):
        set_half(row, size - 2, bits)
    return made


def rounded(values: np.ndarray, block: int, signed: bool, half_scale: bool) -> np.ndarray:
    """Activations after rounding; numpy keeps to f32 throughout, and rint breaks ties to even."""
    rows = values.reshape(-1, block)
    extreme = np.take_along_axis(rows, np.abs(rows).argmax(axis=1, keepdims=True), axis=1)
    factor = np.float32(-127) / extreme if signed else np.float32(127) / np.abs(extreme)
    scale = np.float32(1) / factor if signed else np.abs(extreme) / np.float32(127)
    if half_scale:
        scale = scale.astype(np.float16).astype(np.float32)
    q = np.clip(np.nan_to_num(np.rint(rows * factor)), -128, 127).astype(np.int8)
    return np.where(extreme == 0, np.float32(0), scale * q.astype(np.float32)).reshape(-1)


def activations(rng: np.random.Generator) -> np.ndarray:
    """Twelve blocks of 256: ordinary, long-tailed, extreme first or last and of either sign, exact ties, tiny, zero."""
    made = rng.standard_normal((12, 256)).astype(np.float32)
    made[1] = made[1] ** 5
    made[2] *= np.float32(1e4)
    made[3, 0], made[3, 255] = -9, 9
    made[4, 0], made[4, 255] = 9, -9
    made[5] = rng.integers(-254, 255, 256) / np.float32(2)  # halves: ties where 127 is the extreme
    made[5, ::32] = 127
    made[6] *= np.float32(1e-6)
    made[7] *= np.float32(1e-30)
    made[8] *= np.float32(1e-39)
    made[9] = 0
    made[10, :128] = 0
    made[11] = -np.abs(made[11])
    return made.reshape(-1)


def main() -> None:
    folder = Path(__file__).parent / "golden"
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(2026)
    for name in ["F32", "F16", "BF16", *SCALE_AT, "IQ1_M", "MXFP4"]:
        kind = GGMLQuantizationType[name]
        length, size = GGML_QUANT_SIZES[kind]
        made = (numbers if length == 1 else blocks)(name, size, rng)
        with np.errstate(all="ignore"):
            weights = dequantize(made.reshape(-1), kind)
        assert weights.size == made.shape[0] * length
        (folder / f"{name.lower()}.bin").write_bytes(made.tobytes() + weights.astype("<f4").tobytes())
    grids = b""
    for codebook in [IQ1_S, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S]:
        codebook.init_grid()
        grids += codebook.grid.astype(np.int8).tobytes()
    (folder / "codebooks.bin").write_bytes(grids)
    values = activations(rng)
    with np.errstate(all="ignore"):
        outs = [values, rounded(values, 32, False, True), rounded(values, 256, True, False)]
    (folder / "activation.bin").write_bytes(np.concatenate(outs).astype("<f4").tobytes())


if __name__ == "__main__":
    main()
