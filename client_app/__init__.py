"""The groups' side: private survey answers, scoring, and a single exit for replies."""
