"""Secure sums over groups: the server learns the total, but no summand (docs/privacy.md). Imported by both sides."""
