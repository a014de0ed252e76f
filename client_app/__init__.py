"""A group's side: its private survey answers, scoring, and the one exit for replies."""
