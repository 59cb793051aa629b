"""Episodic memories: a durable index on the disk and one in RAM, and the vector search of both."""
