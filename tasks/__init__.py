"""LightningModules: one file for each training paradigm."""
