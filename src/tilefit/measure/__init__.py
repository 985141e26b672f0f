"""What the hardware really does: timers, microbenchmarks, suites and the result store."""
