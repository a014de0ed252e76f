"""The policy of a data owner, and the ledger of a group's replies. Imported by both sides."""
