"""QNT: sizes that leave tiles or waves of a matrix product partly empty."""
