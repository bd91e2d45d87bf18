"""Launchers start processes and place components: one mode each."""
