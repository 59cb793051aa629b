"""Evaluation while training: a process of low priority that measures suites on the checkpoints of a run."""
