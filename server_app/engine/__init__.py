"""Log-probabilities of responses with as little computing as gives the same numbers."""
