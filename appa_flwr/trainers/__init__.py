"""Clients of a served run (`appa serve`) for trainers of other makers: httpx, and none of this project's libraries."""
