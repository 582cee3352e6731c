"""The command line: the same stages as the panel, one file a verb."""
