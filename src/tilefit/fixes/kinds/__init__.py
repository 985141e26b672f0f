"""The fixes: each finds what it changes in a step, and gives modules another way to compute it."""
