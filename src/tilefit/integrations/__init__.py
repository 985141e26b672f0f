"""Callbacks for other libraries' trainers, each imported with its module, and reports in trackers."""
