"""Simulated sites, each written to disk as a hospital would have it.

A simulated site is an ordinary site: a folder with a labels.csv that holds its own columns only, and a
suture.toml. Which site knows which classes is recorded in the run folder of the machine that simulates.
"""
