"""The data package: raw text to tokenised, packed shards on disk, and from these to batches."""
