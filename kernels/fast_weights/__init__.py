"""Projections with fast weights: a base product and a low-rank term of its own for each row."""
