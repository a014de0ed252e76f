"""Command line: starting a run, following it, and ending the processes that it started."""
