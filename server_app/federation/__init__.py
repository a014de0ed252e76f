"""The server's side of the federation: the members of a run, requests to the groups, and their replies."""
