"""Contents of a run folder, and who may go on with it. Never imported by groups."""
