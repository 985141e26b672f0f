"""Source patches: findings answered in the user's own files, by edits of their text."""
