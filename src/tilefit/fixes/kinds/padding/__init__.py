"""Sizes that fit the tiles: what is padded, how far it stays so, and images in NHWC."""
