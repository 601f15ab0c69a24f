"""Weights between the checkpoint and the kernels.

    int4.py      4-bit integers with one bf16 scale per group, bit for bit as `compressed-tensors` stores them ("pack-quantized")
    prepack.py   the same numbers in the order in which a tensor-core kernel reads them

Everything here is a pure function of numpy arrays and works through its input in chunks: beside input and result a call needs a
few megabytes.
"""
