"""A CUDA device that is not there: its tensors say ``cuda:0`` and lie on no memory.

For a process of its own, which ends afterwards: what is lent to PyTorch here is never taken back.
"""
