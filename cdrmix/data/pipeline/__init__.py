"""The stages of the preparation: reading, deduplication, tokenisation, report. Each task writes whole files."""
