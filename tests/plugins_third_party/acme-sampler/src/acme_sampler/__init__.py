"""AcmeSampler, an engine of its own that needs no torch."""
