"""Models on their way out of a run and back in: export and reload."""
