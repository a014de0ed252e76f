"""Starting a run from the command line, following it, and ending what it started. For whoever sits at a terminal."""
