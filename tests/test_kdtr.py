"""KDTR files: what goes in comes out, the bytes are pinned, and no damage passes or does harm.

The helpers below know the layout from docs/kdtr.md, not from the module, so that the two check each other.
"""

from __future__ import annotations

import errno
import io
import os
import random
import re
import shutil
import stat
import struct
import subprocess
import tempfile
import threading
import tracemalloc
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_numba import kdtr

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [*map(np.dtype, ["bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"]), BF16]
DOC = (Path(__file__).parents[1] / "docs" / "kdtr.md").read_text(encoding="utf-8")

GOLDEN = {
    "sm_scale": np.float32(0.14468),
    "ckv": np.array([[1, -2, 0.5], [3, 256, -0.0]], dtype=BF16),
}
GOLDEN_BYTES = (
    bytes.fromhex("89 4b 44 54 52 0d 0a 1a 01 00 00 00 1a 71 b0 ca c0 02 00 00 00 00 00 00 02 00 00 00 00 00 00 00")
    + bytes(32)
    + bytes.fromhex("73 6d 5f 73 63 61 6c 65")
    + bytes(152)
    + bytes.fromhex("0c 00 00 00 00 00 00 00")
    + bytes(64)
    + bytes.fromhex("40 02 00 00 00 00 00 00 04 00 00 00 00 00 00 00 f4 b3 78 a0 00 00 00 00")
    + bytes.fromhex("63 6b 76")
    + bytes(157)
    + bytes.fromhex("0b 00 00 00 02 00 00 00 02 00 00 00 00 00 00 00 03 00 00 00 00 00 00 00")
    + bytes(48)
    + bytes.fromhex("80 02 00 00 00 00 00 00 0c 00 00 00 00 00 00 00 3f e9 3f 67 00 00 00 00")
    + bytes.fromhex("fe 26 14 3e")
    + bytes(60)
    + bytes.fromhex("80 3f 00 c0 00 3f 40 40 80 43 00 80")
    + bytes(52)
)

# A scalar, one that needs no padding, empty ones in the middle and at the end, bool, a name beyond ASCII.
SAMPLE = {
    "scalar": np.float64(-0.5),
    "full": np.arange(16, dtype=np.int32),
    "empty": np.zeros((2, 0, 3), np.float16),
    "mask": np.array([[True, False, True], [False, True, True]]),
    "Größe": np.array([1.5, -3], dtype=BF16),
    "nothing": np.zeros(0, np.uint8),
}


# ---- helpers -------------------------------------------------------------------------------------------------------

HEADER_FIELDS = {"magic": (0, "8s"), "version": (8, "I"), "crc": (12, "I"), "file_size": (16, "Q")}
HEADER_FIELDS |= {"num_tensors": (24, "Q"), "reserved": (32, "32s")}
RECORD_FIELDS = {"name": (0, "160s"), "dtype": (160, "I"), "rank": (164, "I"), "shape": (168, "8Q")}
RECORD_FIELDS |= {"offset": (232, "Q"), "nbytes": (240, "Q"), "crc": (248, "I"), "reserved": (252, "I")}


def locate(field: str) -> tuple[int, str]:
    """ "num_tensors" is a field of the header, "1.offset" one of record 1."""
    if "." not in field:
        return HEADER_FIELDS[field]
    index, name = field.split(".")
    start, code = RECORD_FIELDS[name]
    return 64 + 256 * int(index) + start, code


def get(blob: bytes, field: str):
    start, code = locate(field)
    values = struct.unpack_from("<" + code, blob, start)
    return values if len(values) > 1 else values[0]


def put(blob: bytes, field: str, *values) -> bytes:
    start, code = locate(field)
    damaged = bytearray(blob)
    struct.pack_into("<" + code, damaged, start, *values)
    return bytes(damaged)


def reseal(blob: bytes) -> bytes:
    """Make the checksums agree again, where the file's claims allow it, so that damage reaches the inner checks."""
    count = get(blob, "num_tensors")
    if 64 + 256 * count > len(blob):
        return blob
    for i in range(count):
        start, nbytes = get(blob, f"{i}.offset"), get(blob, f"{i}.nbytes")
        blob = put(blob, f"{i}.crc", zlib.crc32(blob[start : start + (nbytes + 63) // 64 * 64]))
    return put(blob, "crc", zlib.crc32(blob[16 : 64 + 256 * count]))


def dump(folder: Path, tensors) -> bytes:
    kdtr.write(folder / "dump.kdtr", tensors)
    return (folder / "dump.kdtr").read_bytes()


def load(folder: Path, blob: bytes, **options):
    (folder / "load.kdtr").write_bytes(blob)
    return kdtr.read(folder / "load.kdtr", **options)


def assert_same(found, wanted) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and found[name].dtype.isnative, name
        assert found[name].shape == value.shape, name
        assert found[name].tobytes() == value.tobytes(), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("kdtr")


# ---- round trips ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize(
    "shape", [(), (1,), (0,), (5,), (3, 0, 2), (2, 3, 4), (64,), (1, 2, 1, 2, 1, 2, 1, 3)], ids=str
)
def test_round_trip(tmp_path, dtype, shape):
    rng = np.random.default_rng(7)
    count = int(np.prod(shape))
    raw = rng.integers(0, 2 if dtype == np.bool_ else 256, count * dtype.itemsize, dtype=np.uint8)
    wanted = {"x": raw.view(dtype).reshape(shape), "y": np.ones(3, dtype)}
    kdtr.write(tmp_path / "a.kdtr", wanted)
    found = kdtr.read(tmp_path / "a.kdtr")
    assert_same(found, wanted)
    for array in found.values():
        assert type(array) is np.ndarray
        assert array.flags.c_contiguous and array.flags.aligned
        assert array.ctypes.data % 64 == 0


names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=39)


@st.composite
def arrays(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=8)))
    count = int(np.prod(shape))
    raw = np.frombuffer(random.Random(draw(st.integers(0, 99))).randbytes(count * dtype.itemsize), np.uint8)
    return (raw & 1 if dtype == np.bool_ else raw).view(dtype).reshape(shape)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(names, arrays(), max_size=5))
def test_round_trip_of_anything(folder, tensors):
    blob = dump(folder, tensors)
    assert_same(load(folder, blob), tensors)
    assert reseal(blob) == blob  # the checksums are those that the specification states
    assert dump(folder, load(folder, blob)) == blob


def test_no_tensors(tmp_path):
    blob = dump(tmp_path, {})
    assert len(blob) == 64
    assert load(tmp_path, blob) == {}


def test_scalars_come_back_as_arrays_of_rank_0(tmp_path):
    scalars = {dtype.name: dtype.type(1) for dtype in DTYPES}
    found = load(tmp_path, dump(tmp_path, scalars))
    assert [(array.dtype, array.shape, array.item()) for array in found.values()] == [(d, (), 1) for d in DTYPES]


@pytest.mark.parametrize(
    "bits, dtype",
    [
        (np.array([0x7F800001, 0xFFC12345, 0x80000000, 1], np.uint32), np.dtype("f4")),
        (np.array([0x7FF0000000000001, 0xFFF8123456789ABC, 1 << 63, 1], np.uint64), np.dtype("f8")),
        (np.array([0x7C01, 0xFE55, 0x8000, 1], np.uint16), np.dtype("f2")),
        (np.array([0x7F81, 0xFFD5, 0x8000, 1], np.uint16), BF16),
    ],
    ids=["f4", "f8", "f2", "bf16"],
)
def test_nan_payloads_zero_signs_and_subnormals_survive(tmp_path, bits, dtype):
    tensors = {"native": bits.view(dtype), "strided": np.repeat(bits, 2).view(dtype)[::2]}
    if dtype != BF16:
        tensors["swapped"] = bits.byteswap().view(dtype.newbyteorder(">"))
    for array in load(tmp_path, dump(tmp_path, tensors)).values():
        assert array.view(bits.dtype).tolist() == bits.tolist()


def test_any_strides_and_byte_order(tmp_path):
    base = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    views = {
        "transposed": base.T,
        "reversed": base[::-1, :, ::-2],
        "broadcast": np.broadcast_to(base[:, :1], (2, 5, 4)),
        "fortran": np.asfortranarray(base),
        "big": base.astype(">i4"),
        "big scalar": np.array(7, ">u2"),
        "mask": (base % 2 == 0)[:, ::2],
        "longlong": base.astype(np.longlong),
    }
    found = load(tmp_path, dump(tmp_path, views))
    for name, view in views.items():
        assert found[name].dtype.isnative and found[name].dtype == view.dtype.newbyteorder("=")
        np.testing.assert_array_equal(found[name], view)


def test_bool_bytes_are_normalized(tmp_path):
    odd = np.array([0, 1, 2, 255], np.uint8).view(np.bool_)
    found = load(tmp_path, dump(tmp_path, {"mask": odd, "scalar": odd[3:].reshape(())}))
    assert found["mask"].view(np.uint8).tolist() == [0, 1, 1, 1]
    assert found["scalar"].view(np.uint8) == 1


# ---- the bytes -----------------------------------------------------------------------------------------------------


def test_golden_bytes(tmp_path):
    assert dump(tmp_path, GOLDEN).hex(" ", 4) == GOLDEN_BYTES.hex(" ", 4)
    assert_same(load(tmp_path, GOLDEN_BYTES), GOLDEN)


def test_document_shows_the_golden_bytes():
    shown = bytearray()
    for line in re.search(r"```text\n(header\n.*?)```", DOC, re.S)[1].splitlines():
        if row := re.match(r"([0-9a-f]{8})((?:\s+[0-9a-f]{2}\b){16})?", line):
            shown += bytes(int(row[1], 16) - len(shown))  # what a "*" stands for
            shown += bytes.fromhex(row[2] or "")
    assert bytes(shown) == GOLDEN_BYTES


def test_same_tensors_give_the_same_bytes(tmp_path):
    blob = dump(tmp_path, SAMPLE)
    assert dump(tmp_path, dict(SAMPLE)) == blob
    assert dump(tmp_path, {name: np.array(value, order="F") for name, value in SAMPLE.items()}) == blob
    assert dump(tmp_path, dict(reversed(SAMPLE.items()))) != blob


def test_layout_is_that_of_the_specification(tmp_path):
    blob = dump(tmp_path, SAMPLE)
    cursor = 64 + 256 * len(SAMPLE)
    for i, (name, value) in enumerate(SAMPLE.items()):
        assert get(blob, f"{i}.name").rstrip(b"\0") == name.encode()
        assert get(blob, f"{i}.shape")[: value.ndim] == value.shape
        assert get(blob, f"{i}.offset") == cursor and cursor % 64 == 0
        assert blob[cursor : cursor + value.nbytes] == value.tobytes()
        cursor = (cursor + value.nbytes + 63) // 64 * 64
    assert len(blob) == cursor == get(blob, "file_size")


# ---- damage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensors", [{}, SAMPLE], ids=["none", "sample"])
def test_every_flipped_bit_is_an_error(tmp_path, tensors):
    blob = dump(tmp_path, tensors)
    for bit in range(8 * len(blob)):
        damaged = bytearray(blob)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(kdtr.KdtrError):
            load(tmp_path, damaged)
        if bit // 8 < 64 + 256 * len(tensors):
            with pytest.raises(kdtr.KdtrError):
                load(tmp_path, damaged, verify=False)


def test_a_matching_checksum_of_the_wrong_range_does_not_hide_a_flip(tmp_path):
    blob = dump(tmp_path, SAMPLE)
    for count in (0, 2, len(SAMPLE) + 1):  # reseal makes the checksum of the claimed table right
        with pytest.raises((kdtr.KdtrLayoutError, kdtr.KdtrNameError)):
            load(tmp_path, reseal(put(blob, "num_tensors", count)), verify=False)


@pytest.mark.parametrize("tensors", [{}, SAMPLE], ids=["none", "sample"])
def test_every_truncation_is_an_error(tmp_path, tensors):
    blob = dump(tmp_path, tensors)
    for length in range(len(blob)):
        for verify in (True, False):
            with pytest.raises(kdtr.KdtrTruncatedError if length else kdtr.KdtrEmptyError):
                load(tmp_path, blob[:length], verify=verify)


@pytest.mark.parametrize("tensors", [{}, SAMPLE], ids=["none", "sample"])
@pytest.mark.parametrize("tail", [b"\0", b"x", bytes(64), bytes(1000)], ids=["0", "x", "64", "1000"])
def test_trailing_bytes(tmp_path, tensors, tail):
    with pytest.raises(kdtr.KdtrTrailingError, match="must have"):
        load(tmp_path, dump(tmp_path, tensors) + tail)


def test_payload_damage_names_the_tensor_and_needs_verify(tmp_path):
    blob = bytearray(GOLDEN_BYTES)
    blob[0x281] ^= 1
    with pytest.raises(kdtr.KdtrChecksumError, match=r"load.kdtr: tensor 'ckv'.*CRC-32"):
        load(tmp_path, blob)
    assert list(load(tmp_path, blob, verify=False)) == ["sm_scale", "ckv"]


ALL_ONES = 2**64 - 1
LONGEST = b"n" * 159
DAMAGE = [
    # In the golden file, record 0 is float32 of rank 0 at 0x240, record 1 bfloat16 [2, 3] at 0x280, the end 0x2c0.
    (kdtr.KdtrMagicError, "must start with", [("magic", b"\x89PNG\r\n\x1a\n")]),
    (kdtr.KdtrMagicError, "must start with", [("magic", bytes(8))]),
    (kdtr.KdtrVersionError, "has version 2; this reader", [("version", 2)]),
    (kdtr.KdtrVersionError, "has version 0", [("version", 0)]),
    (kdtr.KdtrVersionError, "has version", [("version", 2**32 - 1)]),
    (kdtr.KdtrTruncatedError, "a table of", [("num_tensors", 3)]),
    (kdtr.KdtrTruncatedError, "a table of", [("num_tensors", ALL_ONES)]),
    (kdtr.KdtrTruncatedError, "a table of", [("num_tensors", 2**56)]),  # times 256 is 0 in 64 bits
    (kdtr.KdtrTruncatedError, "must have 768", [("file_size", 768)]),
    (kdtr.KdtrTruncatedError, "must have", [("file_size", ALL_ONES)]),
    (kdtr.KdtrTrailingError, "must have 640", [("file_size", 640)]),
    (kdtr.KdtrLayoutError, "reserved bytes", [("reserved", b"\1")]),
    (kdtr.KdtrNameError, "has 0 bytes", [("0.name", b"")]),
    (kdtr.KdtrNameError, "has 160 bytes", [("0.name", b"n" * 160)]),
    (kdtr.KdtrNameError, "only NUL may follow", [("0.name", b"a\0b")]),
    (kdtr.KdtrNameError, "only NUL may follow", [("0.name", LONGEST[:-2] + b"\0n")]),
    (kdtr.KdtrNameError, "must be UTF-8", [("0.name", b"\xff")]),
    (kdtr.KdtrNameError, "must be UTF-8", [("0.name", b"\xc0\x80")]),  # an overlong NUL
    (kdtr.KdtrNameError, "must be UTF-8", [("0.name", b"\xed\xa0\x80")]),  # a surrogate
    (kdtr.KdtrNameError, "must be UTF-8", [("0.name", b"ab\xe4\xb8")]),
    (kdtr.KdtrNameError, "occurs twice", [("1.name", b"sm_scale")]),
    (kdtr.KdtrDtypeError, "dtype code 0", [("0.dtype", 0)]),
    (kdtr.KdtrDtypeError, "dtype code 14", [("0.dtype", 14)]),
    (kdtr.KdtrDtypeError, "dtype code", [("0.dtype", 2**32 - 1)]),
    (kdtr.KdtrShapeError, "has rank 9", [("0.rank", 9)]),
    (kdtr.KdtrShapeError, "has rank", [("0.rank", 2**32 - 1)]),
    (kdtr.KdtrShapeError, "must be 0", [("0.shape", 1, 0, 0, 0, 0, 0, 0, 0)]),
    (kdtr.KdtrShapeError, "must be 0", [("1.shape", 2, 3, 0, 0, 0, 0, 0, 1)]),
    (kdtr.KdtrShapeError, "must have 16", [("1.shape", 2, 4, 0, 0, 0, 0, 0, 0)]),
    (kdtr.KdtrShapeError, "must have 24", [("1.dtype", 12)]),
    (kdtr.KdtrShapeError, "has 13 bytes", [("1.nbytes", 13)]),
    (kdtr.KdtrShapeError, "must have 0", [("1.shape", 2, 0, 0, 0, 0, 0, 0, 0)]),
    (kdtr.KdtrShapeError, "has rank 3|must have 0", [("1.rank", 3)]),
    (kdtr.KdtrShapeError, "at most 2", [("1.shape", 2**63, 3, 0, 0, 0, 0, 0, 0)]),
    (kdtr.KdtrShapeError, "at most 2", [("1.rank", 8), ("1.shape", *[ALL_ONES] * 8)]),
    (kdtr.KdtrShapeError, "at most 2", [("1.shape", 2**62, 0, 0, 0, 0, 0, 0, 0), ("1.nbytes", 0)]),  # one byte more
    # 2**64 bytes, which is 0 in 64 bits; and an empty tensor whose other sizes are too many
    (kdtr.KdtrShapeError, "at most 2", [("1.shape", 2**32, 2**31, 0, 0, 0, 0, 0, 0), ("1.nbytes", 0)]),
    (kdtr.KdtrShapeError, "at most 2", [("1.rank", 3), ("1.shape", 2**32, 2**31, 0, 0, 0, 0, 0, 0), ("1.nbytes", 0)]),
    (kdtr.KdtrLayoutError, "leaves a gap", [("1.offset", 0x2C0)]),
    (kdtr.KdtrLayoutError, "leaves a gap", [("1.offset", ALL_ONES - 63)]),
    (kdtr.KdtrLayoutError, "leaves a gap", [("1.offset", 0x281)]),  # not aligned either
    (kdtr.KdtrLayoutError, "overlaps", [("1.offset", 0x240)]),
    (kdtr.KdtrLayoutError, "overlaps", [("0.offset", 0)]),
    (kdtr.KdtrLayoutError, "overlaps", [("0.offset", 0x280), ("1.offset", 0x240), ("0.offset", 0x200)]),
    (kdtr.KdtrLayoutError, "behind the file's end", [("1.shape", 2, 30, 0, 0, 0, 0, 0, 0), ("1.nbytes", 120)]),
    (kdtr.KdtrLayoutError, "behind the file's end", [("1.shape", 1, 2**62 - 1, *[0] * 6), ("1.nbytes", 2**63 - 2)]),
    (kdtr.KdtrLayoutError, "the file must end there", [("1.shape", 0, 3, 0, 0, 0, 0, 0, 0), ("1.nbytes", 0)]),
    (kdtr.KdtrLayoutError, "reserved field", [("1.reserved", 1)]),
]


@pytest.mark.parametrize("error, message, edits", DAMAGE, ids=[f"{e[0].__name__}-{i}" for i, e in enumerate(DAMAGE)])
def test_crafted_damage(tmp_path, error, message, edits):
    blob = GOLDEN_BYTES
    for field, *values in edits:
        blob = put(blob, field, *values)
    path = tmp_path / "damaged.kdtr"
    path.write_bytes(reseal(blob))
    for verify in (True, False):
        tracemalloc.start()
        try:
            with pytest.raises(error, match=message) as caught:
                kdtr.read(path, verify=verify)
            assert tracemalloc.get_traced_memory()[1] < 200_000  # the exception's own, whatever the file claims
        finally:
            tracemalloc.stop()
        assert caught.type is error
        assert "damaged.kdtr" in str(caught.value)


def test_padding_must_be_zero_even_if_the_checksum_agrees(tmp_path):
    blob = bytearray(GOLDEN_BYTES)
    blob[0x27F] = 1
    with pytest.raises(kdtr.KdtrLayoutError, match="tensor 'sm_scale': the padding"):
        load(tmp_path, reseal(bytes(blob)))


def test_bool_bytes_must_be_0_or_1(tmp_path):
    blob = dump(tmp_path, {"mask": np.ones(3, np.bool_)}).replace(b"\1\1\1", b"\1\2\1")
    with pytest.raises(kdtr.KdtrValueError, match=r"tensor 'mask'.*byte 2"):
        load(tmp_path, reseal(blob))


def test_limits_that_hold_just_so(tmp_path):
    wanted = {LONGEST.decode(): np.zeros([1] * 8), "ä" * 79: np.zeros((2**63 // 4 - 1, 0, 1), np.int16)}
    assert_same(load(tmp_path, dump(tmp_path, wanted)), wanted)


def test_every_error_is_a_kdtr_error_and_a_value_error():
    kinds = [getattr(kdtr, name) for name in kdtr.__all__ if name.startswith("Kdtr")]
    assert len(set(kinds)) == 12
    assert all(issubclass(kind, kdtr.KdtrError) and issubclass(kind, ValueError) for kind in kinds)


def test_empty_file_folder_missing_file(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(kdtr.KdtrEmptyError, match="empty"):
        kdtr.read(tmp_path / "empty")
    with pytest.raises(IsADirectoryError):
        kdtr.read(tmp_path)
    with pytest.raises(FileNotFoundError):
        kdtr.read(tmp_path / "missing")


def mutate(blob: bytes, rng: random.Random) -> bytes:
    """Damage a few fields or bytes with values likely to be plausible, and let the checksums agree."""
    count = get(blob, "num_tensors")
    damaged = blob
    for _ in range(rng.randint(1, 3)):
        choice = rng.random()
        if choice < 0.6:
            field = f"{rng.randrange(count)}.{rng.choice(['dtype', 'rank', 'offset', 'nbytes', 'reserved'])}"
            small = [0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 64, 128, get(blob, field) ^ 1 << rng.randrange(32)]
            damaged = put(damaged, field, rng.choice(small))
        elif choice < 0.75:
            field = f"{rng.randrange(count)}.shape"
            sizes = list(get(damaged, field))
            sizes[rng.randrange(8)] = rng.choice([0, 1, 2, 3, 6, 2**31, 2**32, 2**63, ALL_ONES])
            damaged = put(damaged, field, *sizes)
        elif choice < 0.85:
            damaged = damaged[: rng.randrange(64 + 256 * count, len(blob))] + bytes(rng.choice([0, 1, 64]))
            damaged = put(damaged, "file_size", rng.choice([len(damaged), len(blob)]))
        else:
            at = rng.choice([rng.randrange(16, len(damaged)), 64 + rng.randrange(12)])
            damaged = damaged[:at] + bytes([rng.randrange(256)]) + damaged[at + 1 :]
    return reseal(damaged)


def test_resealed_damage_gives_tensors_or_a_kdtr_error(tmp_path):
    blob = dump(tmp_path, SAMPLE)
    rng = random.Random(11)
    outcomes = set()
    for _ in range(3000):
        try:
            tensors = load(tmp_path, mutate(blob, rng))
        except kdtr.KdtrError as error:
            outcomes.add(type(error))
        else:
            outcomes.add(dict)
            assert dump(tmp_path, tensors) == (tmp_path / "load.kdtr").read_bytes()  # accepted means canonical
    inner = {kdtr.KdtrNameError, kdtr.KdtrDtypeError, kdtr.KdtrShapeError, kdtr.KdtrLayoutError, kdtr.KdtrTrailingError}
    assert outcomes >= inner | {dict}


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400), st.booleans())
def test_arbitrary_bytes_are_refused(folder, blob, signed):
    if signed:
        blob = GOLDEN_BYTES[:12] + blob
    with pytest.raises(kdtr.KdtrError):
        load(folder, blob)


# ---- the C++ reader of the document ----------------------------------------------------------------------------------

CPP_MAIN = r"""
#include <cstdio>
#include <fstream>
#include <iterator>

int main(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
        std::ifstream in(argv[i], std::ios::binary);
        std::vector<char> bytes{std::istreambuf_iterator<char>(in), {}};
        try {
            auto tensors = kdtr::parse(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
            for (auto& t : tensors) {
                for (char c : t.name) std::printf("%02x", unsigned(uint8_t(c)));
                std::printf(" %u", unsigned(t.dtype));
                for (auto size : t.shape) std::printf(" %llu", (unsigned long long)size);
                std::printf(" :");
                for (uint64_t k = 0; k < t.nbytes; ++k) std::printf(" %02x", unsigned(t.data[k]));
                std::printf(";");
            }
            std::printf("\n");
        } catch (const std::runtime_error&) {
            std::printf("refused\n");
        }
    }
}
"""
CODES = {"bool": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint8": 6, "uint16": 7, "uint32": 8, "uint64": 9}
CODES |= {"float16": 10, "bfloat16": 11, "float32": 12, "float64": 13}


def describe(path: Path) -> str:
    """What the C++ program prints for a file, by way of the Python reader."""
    try:
        tensors = kdtr.read(path)
    except kdtr.KdtrError:
        return "refused"
    lines = []
    for name, array in tensors.items():
        data = [f"{byte:02x}" for byte in array.tobytes()]
        words = [name.encode().hex(), CODES[array.dtype.name], *array.shape, ":", *data]
        lines.append(" ".join(map(str, words)) + ";")
    return "".join(lines)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_cpp_reader_of_the_document_agrees(tmp_path):
    (tmp_path / "reader.cpp").write_text(re.search(r"```cpp\n(.*?)```", DOC, re.S)[1] + CPP_MAIN)
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-o", "reader"]
    subprocess.run(["g++", *flags, "reader.cpp"], cwd=tmp_path, check=True, timeout=60)
    sample = dump(tmp_path, SAMPLE)
    every = dump(tmp_path, {dtype.name: np.ones((2, 3), dtype) for dtype in DTYPES})
    blobs = [GOLDEN_BYTES, sample, every, dump(tmp_path, {}), b"", GOLDEN_BYTES + b"\0", GOLDEN_BYTES[:-1]]
    for _, _, edits in DAMAGE:
        damaged = GOLDEN_BYTES
        for field, *values in edits:
            damaged = put(damaged, field, *values)
        blobs.append(reseal(damaged))
    rng = random.Random(5)
    blobs += [mutate(sample, rng) for _ in range(500)]
    for bit in rng.sample(range(8 * len(sample)), 300):
        flipped = bytearray(sample)
        flipped[bit // 8] ^= 1 << bit % 8
        blobs.append(bytes(flipped))
    files = [tmp_path / f"{i}.kdtr" for i in range(len(blobs))]
    for file, blob in zip(files, blobs, strict=True):
        file.write_bytes(blob)
    run = subprocess.run([tmp_path / "reader", *files], capture_output=True, check=True, timeout=60, encoding="utf-8")
    found = run.stdout.split("\n")[:-1]
    wanted = [describe(file) for file in files]
    assert found == wanted
    assert wanted[:4].count("refused") == 0 and 20 < wanted.count("refused") < len(wanted) - 20


# ---- memory map ----------------------------------------------------------------------------------------------------


def test_arrays_are_read_only(tmp_path):
    for array in load(tmp_path, GOLDEN_BYTES).values():
        assert not array.flags.writeable
        with pytest.raises(ValueError):
            array[...] = 0
        with pytest.raises(ValueError):
            array.setflags(write=True)


@pytest.mark.skipif(os.name != "posix", reason="Windows does not replace a mapped file")
def test_a_replaced_file_stays_readable_through_its_old_map(tmp_path):
    path = tmp_path / "a.kdtr"
    old = np.arange(100_000)
    kdtr.write(path, {"x": old})
    mapped = kdtr.read(path, verify=False)["x"]
    kdtr.write(path, {"x": np.zeros(1)})
    np.testing.assert_array_equal(mapped, old)
    path.unlink()
    np.testing.assert_array_equal(mapped, old)


@pytest.mark.skipif(os.name != "posix", reason="Windows does not replace a mapped file")
def test_a_file_can_be_written_from_its_own_map(tmp_path):
    kdtr.write(tmp_path / "a.kdtr", SAMPLE)
    kdtr.write(tmp_path / "a.kdtr", kdtr.read(tmp_path / "a.kdtr"))
    assert_same(kdtr.read(tmp_path / "a.kdtr"), SAMPLE)


# ---- writing -------------------------------------------------------------------------------------------------------


class Fancy(str):
    """A str that a dict holds twice."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other


@pytest.mark.parametrize(
    "name, message",
    [
        ("", "has 0 bytes"),
        ("n" * 160, "has 160 bytes"),
        ("ä" * 80, "has 160 bytes"),
        ("a\0b", "NUL"),
        ("a\0", "NUL"),
        ("\ud800", "UTF-8"),
        (1, "type int"),
        (b"x", "type bytes"),
        (None, "type NoneType"),
        (Fancy("good"), "occurs twice"),
    ],
    ids=["empty", "long", "long-utf8", "nul", "final-nul", "surrogate", "int", "bytes", "none", "twice"],
)
def test_names_that_write_refuses(tmp_path, name, message):
    with pytest.raises(kdtr.KdtrNameError, match=message):
        kdtr.write(tmp_path / "a.kdtr", {"good": np.zeros(3), name: np.zeros(3)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "value",
    [
        np.array([None, {}]),
        np.array(["text"]),
        np.array([b"text"]),
        np.zeros(2, "V2"),
        np.zeros(2, [("a", "f4")]),
        np.complex64(1j),
        np.datetime64("2024-01-01"),
        np.array(1, ml_dtypes.float8_e4m3fn),
        np.ma.masked_array([1.0, 2.0], [True, False]),
        1.5,
        [1.0, 2.0],
        None,
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}",
)
def test_values_that_write_refuses(tmp_path, value):
    (tmp_path / "a.kdtr").write_bytes(b"old")
    with pytest.raises(kdtr.KdtrDtypeError, match=r"tensor 'bad': (has dtype .* must be one of|is a .* must be)"):
        kdtr.write(tmp_path / "a.kdtr", {"good": np.zeros(3), "bad": value})
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_write_refuses_rank_9(tmp_path):
    with pytest.raises(kdtr.KdtrShapeError, match="tensor 'x': has rank 9"):
        kdtr.write(tmp_path / "a.kdtr", {"x": np.zeros([1] * 9)})
    assert list(tmp_path.iterdir()) == []


class FullDisk(io.BufferedWriter):
    """Takes the header, then no more."""

    def write(self, data):
        if self.tell():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


def fail(*args):
    raise OSError(errno.EIO, os.strerror(errno.EIO), "somewhere")


def interrupt(*args):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "where, name, stand_in, error",
    [
        (kdtr, "open", lambda path, mode: FullDisk(io.FileIO(path, "x")), OSError),
        (os, "fsync", fail, OSError),
        (os, "replace", fail, OSError),
        (os, "fsync", interrupt, KeyboardInterrupt),
    ],
    ids=["disk full", "fsync", "replace", "interrupt"],
)
@pytest.mark.parametrize("old", [None, b"old"], ids=["new file", "old file"])
def test_a_failed_write_leaves_everything_as_it_was(tmp_path, monkeypatch, where, name, stand_in, error, old):
    path = tmp_path / "a.kdtr"
    if old:
        path.write_bytes(old)
    with monkeypatch.context() as patch:
        patch.setattr(where, name, stand_in, raising=False)
        with pytest.raises(error) as caught:
            kdtr.write(path, SAMPLE)
    if error is OSError:
        assert caught.value.errno in (errno.ENOSPC, errno.EIO)
        assert caught.value.filename == str(path)
        assert "cannot write the KDTR file" in str(caught.value) and ".tmp" not in str(caught.value)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == ([("a.kdtr", old)] if old else [])


def test_a_real_limit_on_the_file_size(tmp_path):
    resource = pytest.importorskip("resource")
    kdtr.write(tmp_path / "a.kdtr", GOLDEN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        with pytest.raises(OSError, match="cannot write the KDTR file"):
            kdtr.write(tmp_path / "a.kdtr", {"x": np.zeros(1_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [GOLDEN_BYTES]


def test_folders_that_cannot_be_written_to(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"cannot write the KDTR file.*missing"):
        kdtr.write(tmp_path / "missing" / "a.kdtr", GOLDEN)
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match=r"cannot write the KDTR file.*folder"):
        kdtr.write(tmp_path / "folder", GOLDEN)
    assert [file.name for file in tmp_path.rglob("*")] == ["folder"]


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
def test_read_only_folder():
    with tempfile.TemporaryDirectory() as name:  # not tmp_path, whose parents are closed to others
        folder = Path(name)
        kdtr.write(folder / "a.kdtr", GOLDEN)
        folder.chmod(0o555)
        try:
            if os.geteuid() == 0:
                try:
                    os.seteuid(65534)  # permissions mean nothing to root
                except OSError:
                    pytest.skip("cannot become another user")
            assert_same(kdtr.read(folder / "a.kdtr"), GOLDEN)
            with pytest.raises(PermissionError, match=r"cannot write the KDTR file: Permission denied: '.*a\.kdtr'"):
                kdtr.write(folder / "a.kdtr", {})
        finally:
            os.seteuid(os.getuid())
            folder.chmod(0o755)
        assert [path.read_bytes() for path in folder.iterdir()] == [GOLDEN_BYTES]


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_mode_honours_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        kdtr.write(tmp_path / "a.kdtr", GOLDEN)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.kdtr").stat().st_mode) == 0o666 & ~mask


def test_odd_paths(tmp_path, monkeypatch):
    home = tmp_path / "Ein Ordner für Maße 漢字"
    home.mkdir()
    longest = "x" * 250 + ".kdtr"
    for path in [home / "fünf Fälle.kdtr", str(home / "a b.kdtr"), home / longest]:
        kdtr.write(path, GOLDEN)
        assert_same(kdtr.read(path), GOLDEN)
    monkeypatch.chdir(home)
    kdtr.write("relative", GOLDEN)
    assert_same(kdtr.read("relative"), GOLDEN)
    assert len(list(home.iterdir())) == 4
    with pytest.raises(kdtr.KdtrChecksumError, match="漢字/kaputt für immer"):
        (home / "kaputt für immer").write_bytes(put(GOLDEN_BYTES, "crc", 0))
        kdtr.read(home / "kaputt für immer")


@pytest.mark.skipif(os.name != "posix", reason="symbolic links")
def test_symbolic_links_are_followed(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "a.kdtr")
    kdtr.write(tmp_path / "link", GOLDEN)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / "a.kdtr").read_bytes() == GOLDEN_BYTES


@pytest.mark.skipif(os.name != "posix", reason="Windows does not replace a mapped file")
def test_writers_and_readers_at_once(tmp_path):
    path = tmp_path / "a.kdtr"
    kdtr.write(path, {"x": np.zeros(1)})
    failures: list[Exception] = []

    def writer(value: int) -> None:
        try:
            for _ in range(25):
                kdtr.write(path, {"x": np.full(1000 + value, value)})
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=writer, args=(value,)) for value in range(1, 5)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        x = kdtr.read(path)["x"]
        assert (x == x[0]).all() and x.size == (1000 + x[0] if x[0] else 1)
    for thread in threads:
        thread.join()
    assert failures == []
    assert [file.name for file in tmp_path.iterdir()] == ["a.kdtr"]
