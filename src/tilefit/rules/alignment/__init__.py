"""ALN: sizes that keep a matrix product off the Tensor Cores' fast path."""
