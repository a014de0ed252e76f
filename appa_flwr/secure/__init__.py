"""Masks for sums over groups. Imported by both sides."""
