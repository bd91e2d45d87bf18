"""AcmeTemplate, a chat template with markup of its own that ships in the package."""
