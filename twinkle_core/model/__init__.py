"""Models that can be trained."""
