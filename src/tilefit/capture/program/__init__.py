"""Running a user's whole program and capturing a step of it."""
