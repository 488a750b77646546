"""LightningDataModules that stream WebDataset shards."""
