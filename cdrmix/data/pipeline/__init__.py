"""Preparation by stages, each a set of tasks that leave whole files: reading, duplicates, tokens, report."""
