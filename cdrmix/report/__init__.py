"""The report of a run: page, plots and sections."""
