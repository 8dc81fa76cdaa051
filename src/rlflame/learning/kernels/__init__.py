"""Compiled kernels for updates on a CPU. Their results are bit-identical to those of numpy."""
