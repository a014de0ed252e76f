"""Sums over groups of which the server learns the total and no summand; see docs/secure_sums.md. For both sides."""
