"""lapbench: what changing the heads of a transformer does to its accuracy and to its token representations."""

__version__ = "0.1.0"
