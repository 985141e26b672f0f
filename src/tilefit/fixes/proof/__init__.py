"""The proof: a model and its changed copy in the same situations, all that is seen of them compared."""
