"""The command `twinkle`: the console script, how it shows errors, and the commands that the core adds."""
