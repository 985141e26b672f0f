"""Callbacks for other libraries' trainers; each module imports its library when it is imported itself."""
