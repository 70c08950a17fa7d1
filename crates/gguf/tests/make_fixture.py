#!/usr/bin/env python3
"""Writes the files in tests/fixtures with the `gguf` package of PyPI, an independent writer.

    pip install gguf==0.19.0 numpy && python3 crates/gguf/tests/make_fixture.py

`fixture.rs` expects exactly these values.
"""

from pathlib import Path

import numpy as np
from gguf import GGUFValueType as T
from gguf import GGMLQuantizationType, GGUFWriter

folder = Path(__file__).parent / "fixtures"
folder.mkdir(exist_ok=True)


def every_value(w: GGUFWriter) -> None:
    w.add_uint8("v.u8", 200)
    w.add_int8("v.i8", -100)
    w.add_uint16("v.u16", 60000)
    w.add_int16("v.i16", -30000)
    w.add_uint32("v.u32", 4000000000)
    w.add_int32("v.i32", -2000000000)
    w.add_float32("v.f32", 0.1)
    w.add_bool("v.true", True)
    w.add_key_value("v.false", False, T.BOOL)
    w.add_string("v.string", "Grüße, 世界")
    w.add_uint64("v.u64", 2**64 - 1)
    w.add_int64("v.i64", -(2**63))
    w.add_float64("v.f64", 0.1)
    arrays = {
        "u8": (T.UINT8, [0, 255]), "i8": (T.INT8, [-128, 127]),
        "u16": (T.UINT16, [0, 65535]), "i16": (T.INT16, [-32768, 32767]),
        "u32": (T.UINT32, [0, 2**32 - 1]), "i32": (T.INT32, [-(2**31), 2**31 - 1]),
        "u64": (T.UINT64, [0, 2**64 - 1]), "i64": (T.INT64, [-(2**63), 2**63 - 1]),
        "f32": (T.FLOAT32, [0.5, -1.25]), "f64": (T.FLOAT64, [0.1, -1e300]),
        "bool": (T.BOOL, [True, False, True]),
    }
    for name, (ty, values) in arrays.items():
        w.add_key_value(f"a.{name}", values, T.ARRAY, sub_type=ty)
    w.add_array("a.string", ["", "a", "Ġhello", "日本"])
    w.add_array("a.nested", [[1, 2, 3], [4], [5, 6]])


def tensors(w: GGUFWriter) -> None:
    w.add_tensor("f32", np.arange(6, dtype=np.float32).reshape(2, 3) - 2.5)
    w.add_tensor("f16", np.arange(5, dtype=np.float16))
    rows = (np.arange(4 * 34) % 251).astype(np.uint8).reshape(2, 2, 34)
    w.add_tensor("q8_0", rows, raw_dtype=GGMLQuantizationType.Q8_0)


def write(w: GGUFWriter) -> None:
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


w = GGUFWriter(folder / "values.gguf", "fixture")
w.add_custom_alignment(64)
every_value(w)
tensors(w)
write(w)

w = GGUFWriter(folder / "split.gguf", "fixture", split_max_tensors=2)
w.add_string("v.string", "split")
for i in range(5):
    w.add_tensor(f"t{i}", np.full(i + 1, i, dtype=np.float32))
write(w)

# A type of ggml that is not among those decoded.
w = GGUFWriter(folder / "unknown.gguf", "fixture")
w.add_tensor("tq2_0", np.arange(66, dtype=np.uint8).reshape(1, 66), raw_dtype=GGMLQuantizationType.TQ2_0)
w.add_tensor("f32", np.ones(1, dtype=np.float32))
write(w)
