"""Sums over groups of which the server learns the total and no summand; see docs/privacy.md. For both sides."""
