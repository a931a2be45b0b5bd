"""KDTR: reference data for kernels, in a container that any language reads in a page of code.

A file holds named tensors and is laid out in exactly one way (docs/kdtr.md is the specification)::

    header   64 bytes        magic, version, CRC-32, file size, number of tensors
    table    256 bytes each  name, dtype, rank, shape, offset, nbytes, CRC-32
    payload                  each tensor in C order at a multiple of 64, zero bytes behind it up to the next one

All fields are little-endian and of fixed width. The header's CRC covers what follows it up to the payload, a tensor's
CRC its data and the zeros behind them, and magic and version have one legal value each: no bit of a file is unguarded.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import secrets
import stat
import struct
import zlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

__all__ = [
    "KdtrChecksumError",
    "KdtrDtypeError",
    "KdtrEmptyError",
    "KdtrError",
    "KdtrLayoutError",
    "KdtrMagicError",
    "KdtrNameError",
    "KdtrShapeError",
    "KdtrTrailingError",
    "KdtrTruncatedError",
    "KdtrValueError",
    "KdtrVersionError",
    "read",
    "write",
]

# As in PNG: a byte above 127 and a line end, so that a transfer in text mode cannot pass unnoticed.
_MAGIC = b"\x89KDTR\r\n\x1a"
_VERSION = 1
_ALIGNMENT = 64
_MAX_RANK = 8
_MAX_NAME_BYTES = 159  # one less than the field, so that a name is always a C string
_MAX_NBYTES = 2**63 - 1

_PREFIX = struct.Struct("<8sII")  # magic, version, CRC-32 of all that follows up to the payload
_HEADER = struct.Struct("<QQ32s")  # file size, number of tensors, reserved
_RECORD = struct.Struct("<160sII8QQQII")  # name, dtype, rank, shape, offset, nbytes, CRC-32, reserved
_TABLE_START = _PREFIX.size + _HEADER.size

_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.bool_),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<u1"),
    7: np.dtype("<u2"),
    8: np.dtype("<u4"),
    9: np.dtype("<u8"),
    10: np.dtype("<f2"),
    11: np.dtype(ml_dtypes.bfloat16),
    12: np.dtype("<f4"),
    13: np.dtype("<f8"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_DTYPE_NAMES = ", ".join(dtype.name for dtype in _DTYPES.values())


class KdtrError(ValueError):
    """A file that is not sound KDTR, or tensors that KDTR cannot hold."""


class KdtrEmptyError(KdtrError):
    """The file has no bytes."""


class KdtrMagicError(KdtrError):
    """The file is something else than KDTR."""


class KdtrVersionError(KdtrError):
    """The file has a version that this reader does not know."""


class KdtrTruncatedError(KdtrError):
    """The file is shorter than it says."""


class KdtrChecksumError(KdtrError):
    """Bytes of the header, the table or a tensor have changed."""


class KdtrLayoutError(KdtrError):
    """A gap, an overlap, a misplaced tensor, or a byte that must be zero and is not."""


class KdtrTrailingError(KdtrLayoutError):
    """The file goes on behind its end."""


class KdtrNameError(KdtrError):
    """A tensor's name is empty, too long, used twice, not UTF-8, or holds a NUL."""


class KdtrDtypeError(KdtrError):
    """A tensor's dtype is none of those that KDTR has."""


class KdtrShapeError(KdtrError):
    """A tensor's rank or shape is out of bounds or contradicts its size."""


class KdtrValueError(KdtrError):
    """A bool tensor holds a byte other than 0 and 1."""


def read(path: str | os.PathLike[str], *, verify: bool = True, copy: bool = False) -> dict[str, npt.NDArray[Any]]:
    """Map a KDTR file into memory.

    Parameters
    ----------
    path : str or os.PathLike
        The file.
    verify : bool
        Read the whole payload once: its checksums, its zero padding, and bool bytes. Without it only the pages that the
        caller touches are read, and damage to the payload goes unseen. Header and table are always checked in full.
    copy : bool
        Read the file into memory instead of mapping it: for a file that may be changed *in place* meanwhile, as no
        KDTR writer does. Such a change shows in mapped tensors, and the process ends (SIGBUS on POSIX systems) as it
        touches mapped pages that a shortened file has lost, be it in `read` or later.

    Returns
    -------
    dict of str to numpy.ndarray
        The tensors in file order, C-contiguous, read-only (writable with `copy`), at addresses that are multiples of
        64. bfloat16 is ``ml_dtypes.bfloat16``, a scalar an array of shape (). They keep the map alive, and a file that
        `write` puts in this one's place does not change them.

    Raises
    ------
    OSError
        The path cannot be opened or mapped (FileNotFoundError, IsADirectoryError, PermissionError, ...), or is a
        pipe, a device or the like.
    KdtrError
        The file is damaged; each kind of damage is one subclass. Nothing is allocated by what a damaged file claims:
        all sizes are held against the file's length first.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        status = os.fstat(file.fileno())
        size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", os.fspath(path))
        if size == 0:
            raise KdtrEmptyError(f"{path}: the file is empty; a KDTR file has at least {_TABLE_START} bytes")
        try:
            # Both start at a page, so that each tensor stands at a multiple of 64.
            data = mmap.mmap(-1, size) if copy else mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
            there = file.readinto(data) if copy else size
        except ValueError:
            there = 0  # a map longer than the file is refused
        if there < size:
            raise KdtrTruncatedError(f"{path}: became shorter while it was read")
    view = memoryview(data)
    payload_start = _check_header(view, path)

    tensors: dict[str, npt.NDArray[Any]] = {}
    cursor = payload_start
    for index, record in enumerate(_RECORD.iter_unpack(view[_TABLE_START:payload_start])):
        name = _decode_name(record[0], f"{path}: tensor {index}")
        where = f"{path}: tensor {name!r}"
        if name in tensors:
            raise KdtrNameError(f"{where}: the name occurs twice; names must be unique")
        dtype, shape, nbytes = _check_type(record, where)
        offset, crc, reserved = record[11], record[13], record[14]
        if offset != cursor:
            kind = "overlaps what stands before it" if offset < cursor else "leaves a gap before it"
            raise KdtrLayoutError(f"{where}: its data at offset {offset} {kind}; it must be at {cursor}")
        if reserved != 0:
            raise KdtrLayoutError(f"{where}: the reserved field is {reserved:#x}; it must be 0")
        cursor = _align(offset + nbytes)
        if cursor > len(view):
            raise KdtrLayoutError(f"{where}: its data would end at {cursor}, behind the file's end at {len(view)}")
        if verify:
            _check_payload(view[offset:cursor], nbytes, dtype, crc, where)
        tensors[name] = np.ndarray(shape, dtype, buffer=data, offset=offset)
    if cursor != len(view):
        raise KdtrLayoutError(f"{path}: the last tensor ends at {cursor}; the file must end there, not at {len(view)}")
    return tensors


def write(path: str | os.PathLike[str], tensors: Mapping[str, npt.NDArray[Any] | np.generic]) -> None:
    """Write tensors as a KDTR file, whole or not at all.

    The bytes go to a temporary file in the same folder, reach the disk, and then take the place of `path` in one step:
    a reader sees the old file or the new one, and of two writers at once the later wins. On failure the old file stays
    and the temporary one is removed; a process that is killed leaves it behind (``.kdtr-*.tmp``). The same tensors in
    the same order give the same bytes.

    Parameters
    ----------
    path : str or os.PathLike
        The file. A symbolic link is followed. The mode is that of any new file under the process's umask.
    tensors : mapping of str to numpy.ndarray or numpy scalar
        Any strides and byte order; rank 0 to 8, empty ones too. Names have 1 to 159 bytes of UTF-8 without NUL.
        Python numbers and lists are refused: their dtype would be a guess.

    Raises
    ------
    KdtrNameError, KdtrDtypeError, KdtrShapeError
        A name or a tensor that KDTR cannot hold; raised before anything is written.
    OSError
        The file cannot be written (no such folder, no permission, disk full, `path` is a folder, a device, ...).
    """
    encoded: dict[bytes, npt.NDArray[Any]] = {}
    for name, value in tensors.items():
        key = _encode_name(name, f"{path}: tensor {name!r}")
        if key in encoded:
            raise KdtrNameError(f"{path}: tensor {name!r}: the name occurs twice; names must be unique")
        encoded[key] = _to_storable(value, f"{path}: tensor {name!r}")

    cursor = _TABLE_START + _RECORD.size * len(encoded)
    records = []
    for key, array in encoded.items():
        crc = zlib.crc32(_padding(array.nbytes), zlib.crc32(_raw_bytes(array)))
        shape = array.shape + (0,) * (_MAX_RANK - array.ndim)
        records.append(_RECORD.pack(key, _CODES[array.dtype], array.ndim, *shape, cursor, array.nbytes, crc, 0))
        cursor = _align(cursor + array.nbytes)
    guarded = _HEADER.pack(cursor, len(encoded), b"") + b"".join(records)

    # The random name keeps writers apart; a name made from the target's could be too long for the file system.
    target = os.path.realpath(path)
    temporary = os.path.join(os.path.dirname(target), f".kdtr-{secrets.token_hex(16)}.tmp")
    try:
        with suppress(FileNotFoundError):
            mode = os.stat(target).st_mode
            # Renaming over a pipe or a device would take it away; over a folder it fails on its own.
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise OSError(errno.EINVAL, "is not a regular file")
        # Not tempfile: its files are 0600 whatever the umask, and the umask cannot be read without setting it.
        with open(temporary, "xb") as file:
            file.write(_PREFIX.pack(_MAGIC, _VERSION, zlib.crc32(guarded)) + guarded)
            for array in encoded.values():
                file.write(_raw_bytes(array))
                file.write(_padding(array.nbytes))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):  # a plain re-raise would name the temporary file, which is gone
            reason = f"cannot write the KDTR file: {error.strerror or error}"
            raise OSError(error.errno, reason, os.fspath(path)) from error
        raise


def _open_at_once(path: str, flags: int) -> int:
    # To open a pipe would wait for a writer, perhaps for ever. Windows has neither the flag nor such pipes.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _padding(nbytes: int) -> bytes:
    return bytes(-nbytes % _ALIGNMENT)


def _check_header(view: memoryview, path: object) -> int:
    """Check all that belongs to no single tensor; return the offset of the payload."""
    size = len(view)
    if bytes(view[: len(_MAGIC)]) != _MAGIC[:size]:
        raise KdtrMagicError(f"{path}: starts with {bytes(view[:8]).hex(' ')}; must start with {_MAGIC.hex(' ')}")
    if size < _TABLE_START:
        raise KdtrTruncatedError(f"{path}: has {size} bytes; the header alone has {_TABLE_START}")
    _, version, crc = _PREFIX.unpack_from(view)
    if version != _VERSION:
        raise KdtrVersionError(f"{path}: has version {version}; this reader knows version {_VERSION} only")
    file_size, num_tensors, reserved = _HEADER.unpack_from(view, _PREFIX.size)
    payload_start: int = _TABLE_START + _RECORD.size * num_tensors
    if payload_start > size:
        raise KdtrTruncatedError(f"{path}: has {size} bytes; a table of {num_tensors} tensors ends at {payload_start}")
    found = zlib.crc32(view[_PREFIX.size : payload_start])
    if found != crc:
        raise KdtrChecksumError(f"{path}: header and table have CRC-32 {found:#010x}; it must be {crc:#010x}")
    if size < file_size:
        raise KdtrTruncatedError(f"{path}: has {size} bytes; it must have {file_size}")
    if size > file_size:
        raise KdtrTrailingError(f"{path}: has {size} bytes; it must have {file_size}")
    if any(reserved):
        raise KdtrLayoutError(f"{path}: the header's reserved bytes are {reserved.hex()}; they must be 0")
    return payload_start


def _decode_name(field: bytes, where: str) -> str:
    raw, _, rest = field.partition(b"\0")
    if not 1 <= len(raw) <= _MAX_NAME_BYTES:
        raise KdtrNameError(f"{where}: the name has {len(raw)} bytes; it must have 1 to {_MAX_NAME_BYTES}")
    if any(rest):
        raise KdtrNameError(f"{where}: the name {raw!r} is followed by {rest.rstrip(bytes(1))!r}; only NUL may follow")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise KdtrNameError(f"{where}: the name {raw!r} must be UTF-8: {error}") from error


def _encode_name(name: object, where: str) -> bytes:
    if not isinstance(name, str):
        raise KdtrNameError(f"{where}: the name is of type {type(name).__name__}; it must be a str")
    try:
        raw = name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise KdtrNameError(f"{where}: the name cannot be encoded as UTF-8: {error}") from error
    if not 1 <= len(raw) <= _MAX_NAME_BYTES:
        raise KdtrNameError(f"{where}: the name has {len(raw)} bytes of UTF-8; it must have 1 to {_MAX_NAME_BYTES}")
    if 0 in raw:
        raise KdtrNameError(f"{where}: the name must not hold a NUL")
    return raw


def _check_type(record: tuple[Any, ...], where: str) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Return dtype, shape and size in bytes of a table record, the three in agreement."""
    code, rank, sizes, nbytes = record[1], record[2], record[3:11], record[12]
    if code not in _DTYPES:
        raise KdtrDtypeError(f"{where}: has dtype code {code}; it must be 1 to {len(_DTYPES)}")
    if rank > _MAX_RANK:
        raise KdtrShapeError(f"{where}: has rank {rank}; it must be at most {_MAX_RANK}")
    shape, unused = sizes[:rank], sizes[rank:]
    if any(unused):
        raise KdtrShapeError(f"{where}: has sizes {unused} behind its {rank} dimensions; they must be 0")
    dtype = _DTYPES[code]
    # NumPy's own limit, which an empty tensor has to keep as well: its sizes other than 0 count.
    if math.prod(size for size in shape if size) * dtype.itemsize > _MAX_NBYTES:
        raise KdtrShapeError(f"{where}: has shape {shape}; its sizes other than 0 must give at most 2**63 - 1 bytes")
    if nbytes != math.prod(shape) * dtype.itemsize:
        needed = math.prod(shape) * dtype.itemsize
        raise KdtrShapeError(f"{where}: has {nbytes} bytes; {dtype.name} of shape {shape} must have {needed}")
    return dtype, shape, nbytes


def _check_payload(padded: memoryview, nbytes: int, dtype: np.dtype[Any], crc: int, where: str) -> None:
    found = zlib.crc32(padded)
    if found != crc:
        raise KdtrChecksumError(f"{where}: its data have CRC-32 {found:#010x}; it must be {crc:#010x}")
    if any(padded[nbytes:]):
        raise KdtrLayoutError(f"{where}: the padding behind its data must be 0 and is not")
    if dtype == np.bool_:
        highest = np.frombuffer(padded[:nbytes], np.uint8).max(initial=0)
        if highest > 1:
            raise KdtrValueError(f"{where}: is bool and holds the byte {highest}; it must hold 0 and 1 only")


def _to_storable(value: object, where: str) -> npt.NDArray[Any]:
    """Return the value as a little-endian array in C order, without a copy where it is one already."""
    if not isinstance(value, (np.ndarray, np.generic)) or isinstance(value, np.ma.MaskedArray):
        found = f"{type(value).__module__}.{type(value).__qualname__}"
        raise KdtrDtypeError(f"{where}: is a {found}; it must be a NumPy array (not a masked one) or a NumPy scalar")
    array = np.asarray(value)
    code = _CODES.get(array.dtype if array.dtype.isnative else array.dtype.newbyteorder("<"))
    if code is None:
        raise KdtrDtypeError(f"{where}: has dtype {array.dtype}; it must be one of {_DTYPE_NAMES}")
    if array.ndim > _MAX_RANK:
        raise KdtrShapeError(f"{where}: has rank {array.ndim}; it must be at most {_MAX_RANK}")
    if array.dtype == np.bool_:
        array = array.view(np.uint8) != 0  # a view may have put other bytes than 0 and 1 into a bool array
    return np.asarray(array, dtype=_DTYPES[code], order="C")


def _raw_bytes(array: npt.NDArray[Any]) -> memoryview:
    # By way of uint8, since bfloat16 arrays export no buffer of their own.
    return array.reshape(-1).view(np.uint8).data
