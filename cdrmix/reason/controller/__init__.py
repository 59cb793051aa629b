"""The controller: whether what a chunk would write is committed or rolled back."""
