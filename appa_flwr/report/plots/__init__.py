"""The pictures of a report, each drawn by one function from typed values and returned as the bytes of a PNG."""
