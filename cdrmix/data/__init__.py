"""The data room: raw text to tokenised, packed shards on disk, and from these to batches."""
