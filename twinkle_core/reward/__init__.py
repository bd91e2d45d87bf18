"""Rewards score sampled answers."""
