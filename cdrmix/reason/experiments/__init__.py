"""Ablations: small models trained in many arms and seeds, and the tables they make."""
