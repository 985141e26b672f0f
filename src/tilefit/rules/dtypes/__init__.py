"""PRC: element types that keep a product off the fast path, and casts that only cost time."""
