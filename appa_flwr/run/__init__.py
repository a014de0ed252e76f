"""Contents of run folders, and conditions for resuming a run. Never imported by groups."""
