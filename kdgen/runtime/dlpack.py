"""DLPack, both ways, by its C structures: reading any library's capsule, and lending own arrays to any library.

numpy alone cannot do it: it knows neither bf16 nor device memory. Layouts: https://dmlc.github.io/dlpack/latest/c_api.html.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kdgen.dtypes import DLPACK, FROM_DLPACK
from kdgen.errors import LaunchError

if TYPE_CHECKING:
    from kdgen.runtime.array import Array

CPU, CUDA, CUDA_PINNED, CUDA_MANAGED = 1, 2, 3, 13
_READ_ONLY = 1


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device", _Device), ("ndim", ctypes.c_int32), ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p), ("deleter", _Deleter),
        ("flags", ctypes.c_uint64), ("tensor", _Tensor),
    )  # fmt: skip


@dataclass(frozen=True)
class Borrowed:
    """What a capsule says. The capsule must live as long as the memory is used.

    Attributes:
        pointer: address of element 0.
        shape: extents.
        dtype: kdgen name.
        device: (DLPack device kind, number).
        readonly: the owner forbids writing.
        contiguous: C-contiguous.
    """

    pointer: int
    shape: tuple[int, ...]
    dtype: str
    device: tuple[int, int]
    readonly: bool
    contiguous: bool


# Prototypes of our own: those of `ctypes.pythonapi` are shared with every other library of the process.
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_raw_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_raw_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_make_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_New", ctypes.pythonapi))

# A capsule keeps only the address of its name.
_PLAIN, _VERSIONED = b"dltensor", b"dltensor_versioned"


def read_capsule(capsule: Any) -> Borrowed:
    """Read the capsule that `__dlpack__` returned; LaunchError for a dtype that kernels have no name for."""
    readonly = False
    if _is_valid(capsule, _VERSIONED):
        versioned = ctypes.cast(_pointer_of(capsule, _VERSIONED), ctypes.POINTER(_ManagedVersioned)).contents
        readonly, tensor = bool(versioned.flags & _READ_ONLY), versioned.tensor
    else:
        tensor = ctypes.cast(_pointer_of(capsule, _PLAIN), ctypes.POINTER(_Managed)).contents.tensor
    kind = (tensor.dtype.code, tensor.dtype.bits)
    if tensor.dtype.lanes != 1 or kind not in FROM_DLPACK:
        raise LaunchError(f"DLPack type code {kind[0]} of {kind[1]} bits × {tensor.dtype.lanes} cannot be given to a kernel")
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    strides = tuple(tensor.strides[axis] for axis in range(tensor.ndim)) if tensor.strides else None
    pointer = (tensor.data or 0) + tensor.byte_offset
    return Borrowed(
        pointer, shape, FROM_DLPACK[kind], (tensor.device.kind, tensor.device.number), readonly, is_contiguous(shape, strides, 1)
    )


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None, item: int) -> bool:
    """True for row-major memory without gaps; `strides` and `item` (the innermost stride) in one unit, None for row-major."""
    if strides is None or 0 in shape:
        return True
    expected = item
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class _Loan:
    """An array lent out: the structures that the borrower reads, and the array, until the borrower gives it back."""

    def __init__(self, array: Array, device: tuple[int, int], *, versioned: bool):
        self.array = array
        ndim = array.ndim
        strides, stride = [0] * ndim, 1
        for axis in reversed(range(ndim)):
            strides[axis] = stride
            stride *= array.shape[axis]
        self.shape = (ctypes.c_int64 * max(1, ndim))(*array.shape)
        self.strides = (ctypes.c_int64 * max(1, ndim))(*strides)
        tensor = _Tensor(
            array.pointer, _Device(*device), ndim, _Type(*DLPACK[array.dtype], 1),
            ctypes.cast(self.shape, ctypes.POINTER(ctypes.c_int64)), ctypes.cast(self.strides, ctypes.POINTER(ctypes.c_int64)), 0,
        )  # fmt: skip
        self.managed = _ManagedVersioned(1, 0, None, _end_loan, 0, tensor) if versioned else _Managed(tensor, None, _end_loan)


# Loans by the address of their structure. The borrower ends a loan through `_end_loan`, perhaps long after.
_loans: dict[int, _Loan] = {}


def _on_end(managed: int, loans: dict[int, _Loan] = _loans) -> None:
    loans.pop(managed, None)


def _on_drop(capsule: int, loans: dict[int, _Loan] = _loans) -> None:
    # A capsule that was never taken still has its first name: its loan ends with it. A borrower renames the one it takes.
    for name in (_PLAIN, _VERSIONED):
        if _raw_is_valid(capsule, name):
            loans.pop(_raw_pointer_of(capsule, name), None)


_end_loan = _Deleter(_on_end)
_drop_capsule = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_on_drop)


def lend(array: Array, device: tuple[int, int], *, versioned: bool) -> Any:
    """A capsule for `array`, as `__dlpack__` returns it; the array lives until the borrower drops it.

    Args:
        array: to lend.
        device: (DLPack device kind, number).
        versioned: the borrower knows DLPack 1.0.
    """
    loan = _Loan(array, device, versioned=versioned)
    address = ctypes.addressof(loan.managed)
    _loans[address] = loan
    return _make_capsule(address, _VERSIONED if versioned else _PLAIN, ctypes.cast(_drop_capsule, ctypes.c_void_p))
