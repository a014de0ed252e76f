"""What every room uses: errors, files, seeds, Markdown tables. Both sides may enter."""
