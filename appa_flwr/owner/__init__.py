"""Decisions of the owner of a group's data, and the ledger of what has left. Imported by both sides."""
