"""What-if: the step of a target at every point of a grid of sizes, settings, GPUs and ways to split it."""
