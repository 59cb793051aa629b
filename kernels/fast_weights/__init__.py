"""Projections with fast weights: a base product, and a low-rank term that changes with the tokens read."""
