"""User data: the configuration section, inspection of files, readers, description."""
