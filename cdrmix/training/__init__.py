"""Stage A: the engine, the loop, the run folder and what it records."""
