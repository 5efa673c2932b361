"""The import paths of the guide."""
