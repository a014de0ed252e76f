"""What the owner of a group's data decides, and the ledger of what has left. Both sides may enter."""
