"""Contract suites and fakes for the tests of plugins. May import everything in the core, is imported by nothing in it."""
