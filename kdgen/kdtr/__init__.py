r"""KDTR: a tensor container that any language can map into memory.

    save("weights.kdtr", {"w": array}, {"model": "demo"})
    with Reader("weights.kdtr") as file:
        file["w"]                      # a read-only view of the mapped file

Format, version 1
=================

All integers are little-endian and unsigned. CRC is CRC-32 as in zlib, PNG and Ethernet (polynomial 0xEDB88320). A file is

    header (64 bytes) | tensors | index | trailer (64 bytes)

with zero bytes as padding between them, and nothing else: every byte is either covered by a CRC or must be zero.

Header, at offset 0:

    offset  size  content
         0     8  magic 4B 44 54 52 0D 0A 1A 0A ("KDTR", CR LF, 1A, LF: a transfer in text mode breaks it)
         8     4  version: 1. A reader refuses a larger one; magic, version and CRC stay where they are in every version.
        12     4  flags: 0. A reader refuses any other bit.
        16     4  alignment A of the tensors: a power of two, 64 … 1,048,576
        20    40  zero
        60     4  CRC of bytes 0 … 59

Tensors, in the order of the index. The first begins at the smallest multiple of A that is at least 64, each further one at the
smallest multiple of A not below the end of the one before. Elements are row-major (the last extent varies fastest), little-endian.

Index, at the smallest multiple of 64 not below the end of the last tensor (of the header, if there is none). For each tensor:

    offset  size  content
         0     8  offset of the tensor in the file
         8     8  its size in bytes
        16     4  its CRC
        20     2  bytes of its name, N: 1 … 65,535
        22     1  dtype code
        23     1  rank R: 0 … 8
        24   8 R  extents
    24 + 8R    N  name, UTF-8, unique in the file
                  zero bytes up to a multiple of 8

and after the last entry 8 bytes that give the size of the attributes, the attributes (a JSON object, UTF-8), and zero bytes up to a
multiple of 8.

Trailer, the last 64 bytes:

    offset  size  content
         0     8  magic 4B 44 54 52 65 6E 64 0A ("KDTRend", LF)
         8     8  offset of the index
        16     8  size of the index in bytes
        24     8  size of the file in bytes
        32     4  number of tensors
        36     4  CRC of the index
        40    20  zero
        60     4  CRC of bytes 0 … 59 of the trailer

Dtype codes: 1 f64, 2 f32, 3 f16, 4 bf16, 5 i64, 6 i32, 7 i16, 8 i8, 9 u64, 10 u32, 11 u16, 12 u8, 13 int4.

`int4` has logical extents whose last one is a multiple of 8. It is stored as 32-bit words, 8 values to a word, the value of the
lowest column in the lowest 4 bits, each as value + 8; a row of K values is K/8 words.

Writing goes through a temporary file that takes the name by one rename, so a file is either complete or not there. Equal contents
give equal bytes. Opening reads header, index and trailer only; `check` reads everything.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdgen.kdtr.format import Tensor as Tensor
    from kdgen.kdtr.int4 import pack_int4 as pack_int4
    from kdgen.kdtr.int4 import unpack_int4 as unpack_int4
    from kdgen.kdtr.reader import Reader as Reader
    from kdgen.kdtr.writer import TensorWriter as TensorWriter
    from kdgen.kdtr.writer import Writer as Writer
    from kdgen.kdtr.writer import save as save

_PLACES = {
    "Reader": "reader", "Tensor": "format", "TensorWriter": "writer", "Writer": "writer", "pack_int4": "int4", "save": "writer",
    "unpack_int4": "int4",
}  # fmt: skip

__all__ = ["Reader", "Tensor", "TensorWriter", "Writer", "pack_int4", "save", "unpack_int4"]


def __getattr__(name: str) -> Any:
    # numpy is loaded when something here is used: the command line imports this package for its commands' names.
    if name not in _PLACES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
