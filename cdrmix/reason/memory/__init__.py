"""Memories: an episodic index on disk, and the vectors that are kept of what was read."""
