"""Metrics turn what a step computed into numbers for people."""
