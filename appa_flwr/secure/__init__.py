"""Masks for sums over groups. Both sides may enter."""
