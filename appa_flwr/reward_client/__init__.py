"""Clients of a served run (`appa serve`) for other trainers; of this project's libraries they need only httpx."""
