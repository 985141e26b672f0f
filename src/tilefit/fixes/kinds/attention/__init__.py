"""Attention in fused kernels."""
