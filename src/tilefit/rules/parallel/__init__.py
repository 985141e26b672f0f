"""PAR: sizes that do not divide over the GPUs that share a step."""
