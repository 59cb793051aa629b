"""Near-duplicate detection: MinHash and SimHash."""
