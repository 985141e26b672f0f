"""A user's program, run unmodified on the emulated GPU, and the step that it makes."""
