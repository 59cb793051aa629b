"""The report of a run: page, plots and their sections."""
