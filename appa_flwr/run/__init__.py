"""What a run writes into its folder, and who may go on with it. No group's side may enter."""
