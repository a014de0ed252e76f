"""Contents of a run folder, and who may go on with it. No group's side may enter."""
