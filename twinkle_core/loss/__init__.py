"""Losses turn per-token log-probabilities into a sum and a count."""
