"""Source patches: findings answered in the user's own files. Needs the ``fix`` extra (libcst)."""
