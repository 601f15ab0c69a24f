"""How rows lie in the paged cache: layout rows, plain, and layout rows-xor8.

rows-xor8: inside each 128 bytes of a row, 16-byte unit u stands at u ^ (row & 7), row being the slot within its page. A tile that is copied
as it lies is then free of bank conflicts for `ldmatrix`, with no padding between rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def swizzled(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rows `[…, page_size, width]` to and from layout rows-xor8 (its own inverse)."""
    page_size, width = rows.shape[-2:]
    per_unit = 16 // rows.dtype.itemsize
    slots, units = np.arange(page_size)[:, None], np.arange(width // per_unit)[None, :]
    columns = ((units ^ (slots & 7))[:, :, None] * per_unit + np.arange(per_unit)).reshape(page_size, width)
    return np.ascontiguousarray(rows[..., slots, columns])


def check_swizzle(row_bytes: int, page_size: int) -> None:
    """ValueError when rows of that size, in pages of that many, cannot be laid out as rows-xor8."""
    if row_bytes % 128 or page_size % 8:
        raise ValueError(
            f"swizzle needs rows of a multiple of 128 bytes, pages of a multiple of 8 rows; got {row_bytes} bytes, {page_size} rows"
        )
