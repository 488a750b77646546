"""Sweeps: a grid of runs from one file, each run a process and a folder of its own. Imports no torch."""
