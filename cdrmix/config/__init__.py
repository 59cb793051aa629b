"""From YAML to a checked configuration of one run."""
