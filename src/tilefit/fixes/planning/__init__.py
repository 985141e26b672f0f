"""Which fixes are made: found, priced, proven, measured; and what is told of it."""
