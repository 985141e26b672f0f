"""BAT: a batch too small for the GPU's rate, or too large for its memory."""
