"""The kinds of targets that are written ``prefix:name``, a module each."""
