"""Compiled programs: which there are, compiling, keeping and loading them."""
