"""What only a group knows: its private survey answers, scoring, and the one exit for replies."""
