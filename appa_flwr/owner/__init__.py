"""What the owner of a group's data decides, and what is kept for him: his policy, and the ledger of what has left."""
