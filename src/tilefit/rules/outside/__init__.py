"""NTC: time spent outside the Tensor Cores."""
