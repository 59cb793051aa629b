"""Stage B: fast weights that models write themselves, and memory beyond their window."""
